"""Writes into the pool of KV blocks: new keys and values into slots, and whole blocks onto blocks."""
