"""Quantize to a table of values and back."""
