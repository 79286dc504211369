"""Statistics of a layer's inputs.

`observe` adds tokens x [..., K] in place to the diagonal blocks of the Hessian, float32
[ceil(K / 32), 32, 32] += sum x x^T, to their count, int64 [1], and to the largest magnitude,
float32 [1]. Count and magnitude are equal to the bit; sums are within float32 rounding
of float64's, equal where all sums are exact, and the same bits on every run. `observe_full_ref`
does it for the whole Hessian [K, K] and `observe_cross_ref` for inputs of two models, by products
of torch: those of 16-bit tokens on a GPU by tensor cores, all others in IEEE float32.
"""
