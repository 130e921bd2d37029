"""Rotary position embeddings of heads; `reference.py` is the definition."""
