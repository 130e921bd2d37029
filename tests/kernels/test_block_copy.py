"""Moves of whole blocks in plain XLA against the definition, bit for bit."""

from __future__ import annotations

import jax

from pallas_kernels.block_copy import cases, xla
from tests.kernels.block_copy import BlockCopyTests

MOVES = {
    name: jax.jit(getattr(xla, name)) for name in ("copy_blocks", "gather_blocks", "scatter_blocks")
}
FIRST, LAST = (
    next(pool for pool in cases.POOLS if pool.name == name)
    for name in ("bfloat16-heads", "int8-tpu")
)


class TestXLA(BlockCopyTests):
    """In every layout."""

    fast = ("more-than-in-flight", "chain-backwards", "swap")
    pools = (FIRST, *(pool for pool in cases.POOLS if pool not in (FIRST, LAST)), LAST)

    def run(self, name, *arguments):
        return MOVES[name](*arguments)
