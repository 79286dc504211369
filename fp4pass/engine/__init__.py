"""Layers in order: bring each to a device, run it, quantize it, store it, release it."""
