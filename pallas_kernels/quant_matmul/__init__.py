"""Products of activations with weights in 8 or 4 bits; `reference.py` is the definition."""
