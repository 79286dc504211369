"""Quantize activations, alone or fused with the norm or the activation function before them.

In: x [..., K] in float32, bfloat16, float16 or float64, K in whole blocks; the stored global scale,
[1] float32 or None; arguments of the fused function. Out: packed codes uint8 [..., P], scale bits
uint8 [..., K / block]. A block with NaN or infinity gets the scale NaN, others are not affected.

With "naive" scales the kernels give the bits of naive.py for the same values. Fused kernels sum
means in another order, and round as eager PyTorch otherwise. "sse" scales are the best of all in
naive.py, and in the kernels the best of a few near the naive one (tiles.py).
"""
