"""Multiply activations and packed weights.

In: x [..., K], or its codes and scales; a weight [N, K] as packed codes, scale bits and a stored
global scale; a bias [N] or None. Out: [..., N] in the dtype of x, rounded once from float32 sums.
naive.py dequantizes to the dtype of x and calls F.linear. The kernels decode weights in
registers, exactly, and give each result within the rounding of a float32 sum; for many rows they
multiply a dense weight (tiling.py says when). A group of weights gives the bits of its members.

The products of a codebook and of int8_reference.py are those of fp4pass.nn's other layers.
"""
