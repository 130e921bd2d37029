"""The TPU kernel on pools of latents, interpreted, against the writes and the attention that define it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxpage.batch import StepBatch
from jaxpage.device import Device
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.ops.attention import Heads, PagedAttention, choose, describe
from jaxpage.parallel.heads import share_heads
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.paged_attention import cases, reference, tpu_choose, tpu_layout
from tests.kernels import test_paged_attention_tpu as on_tpu
from tests.kernels.block_copy import assert_same

HEAD_DIM, VALUE_DIM, WIDTH = (
    160,
    128,
    2 * LANES,
)  # of a key; of its part that is the value; of a slot


def arguments(case: cases.Case, value_dim: int) -> dict:
    """Slots with a token have zeros behind their key, all others NaN. The case's format is of 8-bit floats."""
    arrays = on_tpu.arrays_of(replace(case, format=None))
    keys = np.asarray(arrays["pool"])[:, :, 0]
    is_token = ~np.isnan(np.asarray(keys[..., :1], np.float32))
    behind = np.where(is_token, 0, np.nan).astype(keys.dtype)
    behind = np.repeat(behind, WIDTH - HEAD_DIM, axis=2)
    pool = np.concatenate([keys, behind], axis=2)
    if case.format is not None:
        limit = float(jnp.finfo(FLOATS[case.format]).max)
        rounded = np.clip(pool.astype(np.float32), -limit, limit).astype(FLOATS[case.format])
        bits = np.where(rounded == 0, 0, rounded.view(np.uint8))
        data = on_tpu.as_stored(bits.astype(np.uint8), case.format)
        pool = QuantizedPool(data=data, scale_zero=None, format=case.format)
    return arrays | {"pool": pool, "v": arrays["k"][..., :value_dim]}


def check(
    case: cases.Case,
    *,
    value_dim: int = VALUE_DIM,
    one_query_per_row: bool = False,
    num_drafts: int = 0,
) -> None:
    case = replace(case, num_kv_heads=1, head_dim=HEAD_DIM)
    least = 32 if case.format else 32 // jnp.dtype(case.dtype).itemsize
    case = replace(case, block_size=max(case.block_size, least))
    arrays = arguments(case, value_dim)
    static = on_tpu.static_of(case)
    q, k, v, slots = (arrays[name] for name in ("q", "k", "v", "slot_mapping"))
    rows = [arrays[name] for name in ("block_table", "kv_lens", "query_starts")]
    pool = LatentPool(jax.tree.map(jnp.asarray, arrays["pool"]), value_dim)
    written = write_kv(pool, k, v, slots)
    definition = jax.jit(partial(reference.paged_attention, **static))
    expected = np.asarray(definition(q, written, *rows), np.float32)
    static |= {"one_query_per_row": one_query_per_row, "num_drafts": num_drafts}
    kernel = on_tpu.program(**dict(sorted(static.items())))
    out, after = jax.block_until_ready(kernel(q, k, v, pool, *rows))
    races = on_tpu.interpret_pallas_call.races
    assert races is not None and not races.races_found
    out = np.asarray(out, np.float32)[: sum(case.query_lens)]
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(out, expected[: len(out)], atol=tolerance, rtol=tolerance)
    blocks = np.unique(np.asarray(arrays["block_table"]))  # the null block is nobody's
    own = blocks[blocks > 0]
    stored = on_tpu.with_zeros_of(written.pool, after)
    of_blocks = [jax.tree.map(lambda x: x[own], each) for each in (after, stored)]
    assert_same(*of_blocks)


MIXED = cases.Case(name="", query_lens=(1, 20, 0, 3), kv_lens=(70, 40, 0, 33), num_heads=8)
DECODE = cases.Case(name="", query_lens=(1, 1, 1), kv_lens=(70, 1, 33), num_heads=8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_alone_are_written_and_read(dtype):
    check(replace(MIXED, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [8, 20, 128])
def test_one_query_per_row(num_heads):
    check(replace(DECODE, num_heads=num_heads, dtype="bfloat16"), one_query_per_row=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 20, 128])
def test_any_number_of_heads_is_divided_into_shares(num_heads):
    check(replace(MIXED, num_heads=num_heads, dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("one_query_per_row", [False, True])
def test_values_may_end_within_a_register(one_query_per_row):
    case = DECODE if one_query_per_row else MIXED
    check(case, value_dim=96, one_query_per_row=one_query_per_row)


@pytest.mark.parametrize(("value_dim", "widths"), [(128, [128, 128]), (96, [256]), (256, [256])])
def test_queries_come_as_they_are_computed(value_dim, widths):
    """What latents are multiplied with is not copied to stand beside what is rotated, if it is whole registers."""
    pool = LatentPool(jax.ShapeDtypeStruct((9, 16, WIDTH), jnp.bfloat16), value_dim)
    q = jnp.ones((40, 8, HEAD_DIM), jnp.bfloat16)
    shape = tpu_choose.shape_of(q, pool, 1, 9, sizes=tpu_layout.TileSizes())
    parts = tpu_layout.to_tiles(shape, q)
    assert [part.shape for part in parts] == [(8, 64, width) for width in widths]
    joined = np.concatenate(parts, axis=2).astype(np.float32)
    assert (joined[:, :40, :HEAD_DIM] == 1).all() and joined.sum() == 8 * 40 * HEAD_DIM


@pytest.mark.slow
def test_rows_of_several_fetches_and_parts_of_one():
    lens = (1500, 513, 1024)
    check(replace(DECODE, kv_lens=lens, dtype="bfloat16"), one_query_per_row=True)


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, "fp8_e4m3"])
def test_a_soft_cap_and_a_window_are_as_of_other_pools(format):
    check(replace(MIXED, window=20, soft_cap=5.0, format=format))


@pytest.mark.slow
@pytest.mark.parametrize("one_query_per_row", [False, True])
@pytest.mark.parametrize("format", FLOATS)
def test_latents_in_8_bits(format, one_query_per_row):
    """Of decoding rows several tiles at once."""
    case = MIXED
    if one_query_per_row:
        case = replace(DECODE, kv_lens=(4100, 513, 31))
    check(
        replace(case, dtype="bfloat16", format=format),
        one_query_per_row=one_query_per_row,
        value_dim=VALUE_DIM if one_query_per_row else 96,
    )


def test_what_the_kernel_cannot_read_is_named():
    q = jax.ShapeDtypeStruct((1, 16, 576), jnp.bfloat16)

    def reason(width: int, num_kv_heads: int = 1, q=q, pool: Any = None) -> str | None:
        pool = pool or jax.ShapeDtypeStruct((9, 128, width), jnp.bfloat16)
        return tpu_layout.unsupported_reason(q, LatentPool(pool, 512), num_kv_heads, (64, 32))

    assert reason(640) is None
    assert "in multiples of 128 lanes" in str(reason(576))
    assert "there are 2 KV heads" in str(reason(640, 2))
    bits = jax.ShapeDtypeStruct((9, 128, 640), jnp.uint8)
    scales = jax.ShapeDtypeStruct((9, 4, 128), jnp.bfloat16)
    for format in FLOATS:
        in_floats: Any = QuantizedPool(data=bits, scale_zero=None, format=format)
        assert reason(640, pool=in_floats) is None
        small = replace(in_floats, data=bits.update(shape=(9, 16, 640)))
        assert "at least 32 for this pool, not 16" in str(reason(640, pool=small))
    in_integers: Any = QuantizedPool(data=bits, scale_zero=scales, format="int8")
    assert "the TPU kernel reads no latents in int8" in str(reason(640, pool=in_integers))
    many = str(reason(640, q=q.update(shape=(1, 512, 576))))
    assert "with 512 query heads of 576 that read one latent" in many
    assert many.endswith("; raise tensor_parallel_size")


BFLOAT16 = KVPoolSpec(
    num_arrays=1,
    num_blocks=9,
    block_size=16,
    num_kv_heads=1,
    head_dim=576,
    value_dim=512,
    dtype=jnp.dtype(jnp.bfloat16),
    platform="tpu",
    layout="tpu",
)
HEADS = (Heads(share_heads(16, 1, 1), 576),)


def test_a_kernel_is_chosen_on_tpus_and_on_hopper_gpus(monkeypatch):
    tpu = Device(platform="tpu", kind="TPU v6 lite")
    choice = choose(BFLOAT16, tpu, heads=HEADS, table=(4, 9))
    assert choice.name == "tpu" and choice.chosen.array_shape == (9, 16, 640)
    hopper = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")
    spec = replace(BFLOAT16, platform="gpu", layout="heads")
    for each in ("unsupported_jax", "unsupported_ptxas_here"):
        monkeypatch.setattr(f"pallas_kernels.hopper.{each}", lambda: None)
    monkeypatch.setattr("pallas_kernels.paged_attention.gpu_layout.unsupported_jax", lambda: None)
    choice = choose(spec, hopper, heads=HEADS, table=(4, 9))
    assert choice.name == "hopper" and choice.chosen.array_shape == (9, 16, 576)
    assert describe(choice.name, choice.reason).startswith(
        "the kernel for Hopper GPUs; prompts in plain XLA: their kernel reads keys and values"
    )
    choice = choose(replace(spec, format="fp8_e4m3"), hopper, heads=HEADS, table=(4, 9))
    assert choice.name == "xla" and "latents are fp8_e4m3" in str(choice.reason)
    blocks = replace(BFLOAT16, format="fp8_e4m3", block_size=32)
    assert choose(blocks, tpu, heads=HEADS, table=(4, 9)).name == "tpu"
    many = (Heads(share_heads(128, 1, 1), 576),)
    choice = choose(spec, hopper, heads=many, table=(4, 9))
    assert choice.name == "xla"
    assert "128 query heads that read one latent are more than 16" in str(choice.reason)


@pytest.mark.slow
def test_a_step_has_the_results_of_plain_xla():
    """Of a prompt of 20 tokens, and the second of two tokens."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((21, 16, 576)).astype(jnp.bfloat16)
    k = rng.standard_normal((21, 1, 576)).astype(jnp.bfloat16)
    table = np.asarray([[3, 1], [5, 0]], np.int32)
    slots = np.asarray([*range(48, 64), *range(16, 20), 81], np.int32)
    unused = np.zeros(0, np.int32)
    batch = StepBatch(
        slots=unused,
        query_starts=np.asarray([0, 20, 21], np.int32),
        kv_lens=np.asarray([20, 2], np.int32),
        token_ids=unused,
        positions=unused,
        slot_mappings=slots[None],
        block_tables=table[None],
    )

    def step(spec, pool):
        paged = PagedAttention([pool], batch, (Location(0, 0),), spec=spec, one_query_per_row=False)
        options = {"scale": 0.05, "window": None, "soft_cap": None}
        return paged(0, q, k, k[..., :512], **options), paged.kv_pool[0]

    spec = choose(BFLOAT16, Device(platform="tpu"), heads=HEADS, table=table.shape).chosen
    pool = jnp.zeros(spec.array_shape, jnp.bfloat16)
    expected, written = jax.jit(partial(step, BFLOAT16))(pool)
    with pltpu.force_tpu_interpret_mode():
        out, after = jax.jit(partial(step, spec))(pool)
    assert out.shape == (21, 16, 512) and np.abs(np.asarray(expected, np.float32)).max() > 0.5
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=2e-2, rtol=2e-2
    )
    assert_same(after[1:], written[1:])
