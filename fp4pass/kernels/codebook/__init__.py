"""Quantization to a table of values and back: blocks of the flattened tensor share an absmax.

`quantize_codebook` takes x of any shape with n elements and returns packed codes,
uint8 [ceil(n * bits / 8)], the first of two 4-bit codes in the high half, and absmax,
float32 [ceil(n / block)]. A quotient x / absmax becomes the nearest value of the `Codebook`.
`dequantize_codebook` returns values[code] * absmax in a given shape and dtype.

reference.py is plain torch, triton.py the kernels with the same signatures. All bits are equal,
of codes, absmax and dequantized values, except codes of a block with NaN or infinity, whose absmax
is not finite.
"""
