"""Moves of whole blocks: copies inside the pool, and to and from one dense array that travels to the host."""
