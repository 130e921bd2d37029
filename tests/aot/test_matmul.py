"""The products of few tokens through the compiler of an H200, on a machine that has none."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
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
    # x with zeros, and at most 8 parts of split inputs, of 8 tokens or more.
    x_and_parts = max(8, given.num_tokens) * (2 * given.num_in + 32 * given.num_out)
    assert program["temp_bytes"] <= x_and_parts
