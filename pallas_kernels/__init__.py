"""Kernels by operation: each folder defines one operation and exports it once per platform, with one signature.

| folder | operation | reference | CPU (XLA) |
| --- | --- | --- | --- |
| paged_attention | ragged attention over a paged KV pool | yes | yes |
| kv_write | new K and V into their slots of the pool; block copies | yes (XLA) | yes |

This package imports jax and nothing of jaxpage: it states mechanisms and chooses nothing.
"""
