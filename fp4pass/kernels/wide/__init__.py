"""Products of many rows on Hopper, in Gluon: the next weights are decoded while others multiply."""
