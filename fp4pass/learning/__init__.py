"""Learn what a converted model stores: codes, block scales, norms and biases."""
