"""Graphs: tracing, observers, and the passes that rewrite linears."""
