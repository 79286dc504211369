"""What a block-scaled tensor is: formats, codebooks and the record of a quantized tensor."""
