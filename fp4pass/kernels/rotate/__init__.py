"""Hadamard rotations of blocks of columns."""
