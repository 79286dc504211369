"""Exact folds on exported graphs: rotations (`fold_rotations`) and scales (`fold_scales`)."""
