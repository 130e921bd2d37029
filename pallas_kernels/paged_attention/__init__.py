"""Ragged attention of packed queries over a paged pool of keys and values; `reference.py` is the definition."""
