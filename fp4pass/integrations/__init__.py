"""Adapters to transformers, PEFT and lm-eval; import what you need by name."""
