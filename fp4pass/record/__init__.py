"""The records of a model: options, schemes and qualities, its state, and rows of a report."""
