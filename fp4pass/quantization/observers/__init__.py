"""Observe prepared models: batches, visible tokens, reached layers, and the key-value cache."""
