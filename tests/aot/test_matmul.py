"""The products of few tokens through the compiler of an H200, on a machine that has none."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.wgmma import num_splits
from tests.aot import matmul
from tests.aot.compiling import missing, seen

__test__ = unsupported_jax() is None
pytestmark = pytest.mark.aot

PRODUCTS = list(matmul.products())


@pytest.mark.parametrize("given", PRODUCTS, ids=lambda given: given.name)
def test_every_product_compiles_spills_nothing_and_moves_no_weight(given):
    if reason := missing("h200"):
        pytest.skip(reason)
    (program,) = [p for p in seen("matmul", "h200").programs if p["name"] == given.name]
    ptxas = program["ptxas"]
    assert ptxas["spilled"] == [0] and ptxas["for_hopper"] == 1
    assert not ptxas["waits"]  # wgmma that waits for itself
    assert program["kernel_calls"] == 1 and program["copies"] == []
    assert len(program["exchanges"]) == (given.axis == 1)
    # Parts of split inputs, of whole tiles of tokens; and x where it is padded.
    tile = next(n for n in (8, 16, 32, 64, 128) if n >= min(given.num_tokens, 128))
    num_tokens, shares = -(-given.num_tokens // tile) * tile, [given.num_out, given.num_in]
    if given.axis is not None:
        shares[given.axis] //= 2
    num_parts = num_splits(shares[0] // 128, shares[1] // 64)
    parts = num_parts * num_tokens * shares[0] * 4
    padded = given.num_tokens > 8 and given.num_tokens % 8 != 0
    x = 2 * num_tokens * given.num_in if padded else 0
    # On several devices the sum of a device's parts, before it is exchanged, and after.
    exchanged = 8 * num_tokens * given.num_out if given.axis == 1 else 0
    assert program["temp_bytes"] <= parts + x + exchanged
