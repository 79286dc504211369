"""Calibration: what prepared models see, of which tokens, in which layers."""
