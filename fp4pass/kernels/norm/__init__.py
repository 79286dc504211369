"""RMSNorm before products in floating point, alone or of a sum.

In: x [..., K], a residual like it, a weight [K], all of one dtype. Out: the sum, rounded, and its
norm, rounded before it is multiplied by the weight, as Llama's. naive.py is what eager PyTorch
computes. The kernel adds squares in another order, by which a result may be one rounding away.
"""
