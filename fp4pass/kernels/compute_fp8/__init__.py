"""Multiply on FP8 tensor cores, for `LinearConfig.compute` = "fp8".

In: x [..., K], or its codes and scales; a weight [N, K] as packed codes, scale bits and a stored
global scale; a bias [N] or None. Out: [..., N] in the dtype of x, rounded once from float32 sums.
Both operands are E4M3 with a float32 factor for each row. A row of x is divided by its largest
magnitude / 448. A row of packed codes is multiplied by the largest power of two that fits: exactly
for power-of-two scales that are not too far apart (`is_exact`), with one more rounding for others.
naive.py defines the results, and the number of rows from which products are computed this way.
"""
