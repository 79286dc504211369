"""Attend with few queries to a cache of keys and values, and write to the cache first."""
