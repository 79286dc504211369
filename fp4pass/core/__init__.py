"""Block-scaled tensors: formats, codebooks and the record of a quantized tensor."""
