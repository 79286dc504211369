"""Layers in order: brought to a device, run, quantized, and stored, one after the other."""
