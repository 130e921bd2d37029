"""The TPU kernel's launch for rows with drafts, interpreted, against the reference and in any company."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.batch import StepBatch
from jaxpage.kv_groups import Location
from jaxpage.ops.attention import PagedAttention
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.paged_attention import tpu_choose, tpu_layout
from pallas_kernels.paged_attention.cases import Case
from tests.kernels import test_latents_tpu as of_latents
from tests.kernels import test_paged_attention_tpu as on_tpu
from tests.kernels.test_paged_attention_tpu import ROWS, TOKENS, fitting, to_tpu

# New rows, those that end within a block and with one, and one with more tokens than a tile has.
MIXED = Case(
    name="",
    query_lens=(4, 1, 3, 20, 2, 0, 4),
    kv_lens=(4, 70, 300, 40, 2, 0, 128),
    num_padding_tokens=2,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "format"),
    [
        ({"window": 30, "soft_cap": 5.0}, None),
        ({"num_heads": 6, "num_kv_heads": 2, "head_dim": 96, "dtype": "bfloat16"}, None),
        ({"num_heads": 7, "num_kv_heads": 1, "head_dim": 128, "dtype": "bfloat16"}, "int8"),
        pytest.param(
            {"num_heads": 6, "head_dim": 64, "window": 50}, "int4", marks=pytest.mark.deep
        ),
    ],
)
@pytest.mark.parametrize("num_drafts", [3, pytest.param(7, marks=pytest.mark.deep)])
def test_rows_with_drafts_have_tiles_of_their_own(changes, format, num_drafts):
    case = fitting(replace(MIXED, **changes), format)
    arrays = on_tpu.arrays_of(case)
    shape = tpu_choose.shape_of(
        *(arrays["q"], to_tpu(arrays["pool"]), case.num_kv_heads),
        blocks_per_row=1,
        sizes=tpu_layout.TileSizes(),
    )
    with_drafts = tpu_choose.shape_with_drafts(shape, num_drafts)
    assert with_drafts is not None and with_drafts.tile_q == 1 + num_drafts < shape.tile_q
    on_tpu.check(case, arrays, sinks=True, num_drafts=num_drafts)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "dtype"), [(8, "float32"), (20, "bfloat16")])
def test_latents_too(num_heads, dtype):
    case = replace(MIXED, num_heads=num_heads, dtype=dtype)
    of_latents.check(case, num_drafts=3)


@pytest.mark.slow
def test_a_window_of_latents_too():
    of_latents.check(replace(MIXED, num_heads=8, window=20), num_drafts=4)


@pytest.mark.slow
def test_a_row_s_result_is_the_same_to_the_bit_in_any_company():
    """With prompts and tokens of others, whose keys and values are no numbers, and alone in another place."""
    case = fitting(Case(name="", query_lens=(1, 3, 33, 4), kv_lens=(77, 150, 40, 20)))
    arrays = on_tpu.bucketed(on_tpu.arrays_of(case))
    static = on_tpu.static_of(case) | {"num_drafts": 3}
    out, _ = on_tpu.run(arrays, **static)
    tokens = slice(1, 4)
    assert np.isfinite(out).all()

    token = np.arange(TOKENS)[:, None, None]
    is_other = (token < 1) | (token >= 4)
    broken = {name: np.where(is_other, np.float32(np.nan), arrays[name]) for name in "qkv"}
    in_bad_company, _ = on_tpu.run(arrays | broken, **static)
    np.testing.assert_array_equal(in_bad_company[tokens], out[tokens])
    assert np.isnan(in_bad_company[[0, 4, 36, 37]]).all()

    alone = arrays | {
        "block_table": np.roll(arrays["block_table"], 2, axis=0),
        "kv_lens": np.where(np.arange(ROWS) == 3, 150, 0).astype(np.int32),
        "query_starts": np.array([0, 0, 0, 7, 10, 10, 10], np.int32),
    }
    alone |= {name: np.roll(arrays[name], 6, axis=0) for name in "qkv"}
    moved, _ = on_tpu.run(alone, **static)
    np.testing.assert_array_equal(moved[7:10], out[tokens])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_step_has_the_launch_if_the_engine_has_drafts(num_drafts):
    q, k = jnp.zeros((4, 16, 576), jnp.bfloat16), jnp.zeros((4, 1, 576), jnp.bfloat16)
    zeros = jnp.zeros(4, jnp.int32)
    batch = StepBatch(
        slots=zeros,
        query_starts=jnp.zeros(5, jnp.int32),
        kv_lens=zeros,
        token_ids=zeros,
        positions=zeros,
        slot_mappings=zeros[None],
        block_tables=jnp.zeros((1, 4, 9), jnp.int32),
    )
    spec = replace(of_latents.BFLOAT16, num_drafts=num_drafts, attention="tpu")
    spec = replace(spec, kernel_sizes=tpu_layout.TileSizes())
    pool = jnp.zeros(spec.array_shape, jnp.bfloat16)

    def launches(**options) -> int:
        def step():
            paged = PagedAttention([pool], batch, (Location(0, 0),), spec=spec, **options)
            return paged(0, q, k, k[..., :512], scale=0.05, window=None, soft_cap=None)

        return str(jax.make_jaxpr(step)()).count("name=paged_attention_of_drafts")

    assert launches(one_query_per_row=False) == int(num_drafts > 0)
    assert launches(one_query_per_row=True) == 0


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None):
    """Of rows with several queries in bfloat16, from pools of blocks of 128."""
    q = jax.ShapeDtypeStruct((1, num_heads, head_dim), jnp.bfloat16)
    width = 2 * num_kv_heads * head_dim if value_dim is None else -(-head_dim // 128) * 128
    pool = jax.ShapeDtypeStruct((9, 128, width), jnp.bfloat16)
    own = pool if value_dim is None else LatentPool(pool, value_dim)
    return tpu_choose.shape_of(q, own, num_kv_heads, 256, sizes=tpu_layout.TileSizes())


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (14, 2, 64), (16, 1, 576, 512), (128, 1, 576, 512)]
)
@pytest.mark.parametrize(
    ("num_drafts", "tile_q"), [(0, None), (1, 2), (3, 4), (4, 8), (7, 8), (8, None)]
)
def test_tiles_hold_a_row_with_its_drafts(heads, num_drafts, tile_q):
    """Sums are cut where other rows' are, and VMEM holds what a launch takes."""
    prompts = shape_of(*heads)
    found = tpu_choose.shape_with_drafts(prompts, num_drafts)
    assert (found and found.tile_q) == tile_q
    if found:
        assert found.tile_kv == prompts.tile_kv and found.num_heads == prompts.num_heads
        assert found.vmem_bytes <= tpu_layout.VMEM_BYTES


def test_where_tiles_of_prompts_are_as_small_rows_with_drafts_have_those():
    prompts = replace(shape_of(32, 8, 128), tile_q=4)
    assert tpu_choose.shape_with_drafts(prompts, 3) is None
    assert tpu_choose.shape_with_drafts(prompts, 1) is not None
