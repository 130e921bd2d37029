"""Measurements: `scheduler` (host cost of a step) and `offline` (throughput beside other engines).

Uses the public names of the engine; nothing in the engine knows of it.
"""
