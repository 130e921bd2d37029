"""Rows of a table, such as the embedding of tokens; `reference.py` is the definition."""
