"""Moves of whole blocks on GPUs: XLA's gathers and scatters are these, and no kernel of our own.

What its compiler makes of them for an H200 (tests/aot/test_block_copy.py holds it to that): a copy is a gather and a
scatter for each layer, one kernel each, in place, without a copy of the pool; its temporaries are the copied blocks of
one layer. Blocks leave by gathers fused over layers and come back by one scatter a layer, without temporaries.

What a kernel would have to beat: 64 copies in 28 layers of 128 KB a block, padding included, read and write 0.94 GB,
0.2 ms of an H200's bandwidth, where the weights of such a model (7B) take 3.2 ms a step; and only in steps that copy.
Padding is copied too, which a kernel need not do.
"""

from pallas_kernels.block_copy.xla import copy_blocks, gather_blocks, scatter_blocks

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]
