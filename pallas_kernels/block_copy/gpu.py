"""Copies of whole blocks on GPUs: XLA's gathers and scatters, without a kernel of our own.

XLA's code for an H200 (tests/aot/test_block_copy.py checks it): a copy is a gather and a scatter for each layer, one
kernel each, in place, without a copy of the pool; its temporaries are the copied blocks of one layer. Blocks are read
by gathers fused over layers and written back by one scatter per layer, without temporaries.

What a kernel would have to beat: 64 copies in 28 layers of 128 KB per block read and write 0.94 GB, 0.2 ms of an
H200's bandwidth, while the weights of such a model (7B) take 3.2 ms per step; and only in steps with copies. Of padding
XLA reads the null block, which a kernel could avoid.
"""

from pallas_kernels.block_copy.xla import copy_blocks, gather_blocks, scatter_blocks

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]
