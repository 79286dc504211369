"""Perplexity, KL divergence and accuracy, with confidence intervals."""
