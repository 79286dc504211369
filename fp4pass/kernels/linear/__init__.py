"""Products of activations and packed weights."""
