"""Dequantize packed codes to dense tensors.

In: packed codes uint8 [..., P], scale bits uint8 [..., K / block], the stored global scale, [1]
float32 or None, which divides or multiplies (`Format.multiplies`). Out: [..., K] in the dtype asked
for, computed in float32 and rounded once. A NaN scale makes its block NaN. The kernel gives the
bits of naive.py and takes several tensors in one launch. Only the reference computes in float64.
"""
