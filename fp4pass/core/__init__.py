"""What a block-scaled tensor is: formats and the record of a quantized tensor."""
