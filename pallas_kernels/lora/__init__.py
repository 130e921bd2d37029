"""Low-rank adapters, many in one batch; `reference.py` is the definition."""
