"""Multiply the rows of a mixture and the packed weights of the experts they were routed to.

In: x [T, K], one row for all k experts of a token, or [T, k, K], a row for each; ids int64 [T, k],
the expert of each pair; a stack [E, N, K] as packed codes uint8 [E, N, P], scale bits uint8
[E, N, K / block] and stored global scales float32 [E] or None; a bias [E, N] or None. Out:
[T, k, N] in the dtype of x, zeros where an id is not one of 0 to E - 1. Each row follows the law of
fp4pass.kernels.linear. naive.py runs the loop of transformers' eager experts, to the bit.
"""
