"""Writes into the pool of KV blocks: new keys and values into slots, rounded if the pool is quantised."""
