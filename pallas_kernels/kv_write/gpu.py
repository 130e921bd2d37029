"""Writes of new keys and values on GPUs: XLA's scatter is that, and no kernel of our own.

What its compiler makes of it for an H200 (tests/aot/test_kv_write.py holds it to that): of a pool of floats or fp8 one
kernel, which reads K, V and the slots and writes each element where it stays, without temporaries. With scales there
are two such kernels, of the data and of scales and zeros, after one that finds the least and the greatest value of
each vector; for many tokens another puts K and V side by side first, a temporary of their size.

What a kernel would have to beat: a step of 64 rows of an 8B model writes 4 KB a token and layer, 8 MB in all, and
its weights take 16 GB. Inside the attention kernel nothing would be saved either: there a token's keys and values would
have to be written before another program reads them, a barrier for all programs, which the end of a kernel is.
"""

from pallas_kernels.kv_write.xla import write_kv

__all__ = ["write_kv"]
