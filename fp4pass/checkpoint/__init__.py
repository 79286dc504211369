"""Checkpoints: save, load and convert between the layouts of serving engines."""
