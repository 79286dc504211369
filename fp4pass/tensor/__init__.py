"""Quantize single tensors in any format."""
