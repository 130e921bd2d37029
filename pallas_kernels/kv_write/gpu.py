"""Writes of new keys and values on GPUs: XLA's scatter, without a kernel of our own.

XLA's code for an H200 (tests/aot/test_kv_write.py checks it): a small kernel for the slots, which are the same in all
layers, and for a pool of floats or fp8 one kernel, which reads K, V and the slots and writes each element to its place,
not atomically and without temporaries. With scales there are two such kernels, for the data and for scales and zeros,
after one that computes the minimum and maximum of each vector; for many tokens another one concatenates K and V first,
a temporary of their size.

What a kernel would have to beat: a step of 64 rows of an 8B model writes 4 KB per token and layer, 8 MB in all, and its
weights take 16 GB. Fusing it into the attention kernel would not save anything either: a token's keys and values must
be written before another program reads them, which needs a barrier over all programs, that is, the end of a kernel.
"""

from pallas_kernels.kv_write.xla import write_kv

__all__ = ["write_kv"]
