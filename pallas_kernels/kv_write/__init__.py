"""Writes new keys and values into slots of the KV pool, quantized if the pool is.

For CPUs, GPUs, and pools without a kernel. On a TPU the attention kernel itself writes (`paged_attention/tpu.py`): the
new keys and values must be brought into the register layout, and rows may write into blocks of others.
"""
