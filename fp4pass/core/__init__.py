"""Block-scaled tensors: formats and the record of a quantized tensor."""
