"""Statistics of layer inputs, and errors of quantized weights."""
