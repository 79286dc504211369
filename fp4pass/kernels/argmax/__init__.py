"""Choose the largest number of long rows: the token of greedy decoding.

In: x [..., V]. Out: [...] int64, as torch.argmax: the first of equal numbers, or the first NaN.
"""
