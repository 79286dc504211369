"""Other libraries' names for what fp4pass does with single tensors, for code written with them."""
