"""The flow from a model to packed weights: plan, statistics, scales, search, report."""
