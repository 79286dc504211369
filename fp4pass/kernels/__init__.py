"""Kernels and their references: torch and triton only; they know formats, not models."""
