"""Copies of whole blocks: inside the pool, and to and from a dense array that is transferred to the host."""
