"""Rotate blocks of columns by a Hadamard matrix, alone or before quantization.

In: x [..., K], and a rotation of 32, 64 or 128 columns that divides K. Out: x D in the dtype of x,
or x D quantized without rounding first. D is its own inverse and transpose.
Sums are float32 (float64 for such x); the kernels sum in another order than naive.py, so that
codes may differ where a last bit decides them. Weights are rotated in float64, the same anywhere.
"""
