"""Rounding and tiles that several kernels share."""
