"""Products of activations with 8-bit or 4-bit weights; `reference.py` is the definition."""
