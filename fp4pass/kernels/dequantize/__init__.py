"""Packed codes back to dense tensors."""
