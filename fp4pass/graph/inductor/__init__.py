"""Passes that run inside torch.compile."""
