"""Exact folds on exported graphs: rotations and channel scales."""
