"""Shared pieces of several operators: rounding in PyTorch, and pieces of Triton kernels.

rounding.py has the one rule of rounding, to nearest with ties to the even code, for elements and
for scales, in float32. tiles.py has the same in Triton, and `supports`: which formats the kernels
know, by their properties. Both give the same bits. Nothing here launches a kernel.
"""
