"""Search block scales and codes of weights."""
