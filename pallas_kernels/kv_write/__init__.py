"""Writes into the pool of KV blocks: new keys and values into slots, rounded if the pool is quantised.

For CPUs, GPUs, and pools that no kernel serves. On a TPU the attention kernel itself writes (`paged_attention/tpu.py`),
where the new keys and values have to be brought into registers' order and rows may hit blocks of one another.
"""
