"""Packed linear layers and experts: their buffers, their forward, their caches."""
