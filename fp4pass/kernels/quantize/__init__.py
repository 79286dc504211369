"""Quantize activations, alone or fused with what computes them."""
