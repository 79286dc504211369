"""Workflows on top of the public API: learn codes, merge adapters, choose schemes."""
