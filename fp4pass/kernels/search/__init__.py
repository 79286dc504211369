"""Scales and codes of a weight [N, K] that minimize an error: three operators.

Of each block, with r = w - q (the definitions are in tests/lib/search_definitions.py):
`search` finds the scale of least |r|^2 ("sse") or r^T H r ("hessian") over all scales of the
format, or the naive one, and rounds codes to nearest (reference.py, triton.py).
`joint` improves scale and codes together by r^T H r; no block gets worse (joint_reference.py,
joint_triton.py).
`gptq` does so block after block and compensates for the errors so far by the Hessian of all inputs
(the same files).

weight is [N, K], a block Hessian [ceil(K / 32), 32, 32] float32 (gptq: [K, K]); packed codes are
[N, P] uint8, scale bits [N, K / block] uint8. Reference and kernel have the same signature.

Bits are the same on every run. Kernel and reference agree to the bit for "naive" and "sse"; for
"hessian" except where two scales' errors differ by less than 1e-6 of them or 1e-12 |H| |w|^2; for
joint and gptq except where a target is nearly a tie, with a total loss within 0.1 %.

branch_and_bound.py proves scale and codes of blocks optimal, in plain torch on any device. Proofs
are in docs/search.md and docs/codes.md.
"""
