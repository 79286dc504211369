"""Norms of heads, rotary embedding and the write into a cache, at once."""
