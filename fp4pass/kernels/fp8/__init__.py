"""Multiply on FP8 tensor cores: what `LinearConfig.compute` = "fp8" asks for.

In: x [..., K], or its codes and scales; a weight [N, K] as packed codes, scale bits and a stored
global scale; a bias [N] or None. Out: [..., N] in the dtype of x, rounded once from float32 sums.
Both operands are E4M3 with a float32 factor for each row. A row of x is divided by its largest
magnitude / 448; a row of packed codes is multiplied by the largest power of two that fits, which is
exact for scales that are powers of two and not too far apart (`is_exact`), and rounds others once
more. naive.py says the numbers, and from how many rows on products are computed so.
"""
