"""Attention for TPUs beside JAX's own `ragged_paged_attention`, and the suite's timing of both beside other peers.

JAX's kernel reshapes references, which no interpreter of jax 0.10 and 0.11 can do. So ours is interpreted and held
against the definition that JAX gives beside its kernel; `-m tpu` runs the two kernels themselves. JAX's Triton kernel
for GPUs is interpreted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention,
    ref_ragged_paged_attention,
    tuned_block_sizes,
)

from jaxpage.bench import attention_peers, oracle
from jaxpage.bench.attention_peers import Work
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import cases, reference, tpu
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.tpu_layout import to_tpu
from tests.kernels.paged_attention import dense_attention, run

SHAPE = partial(Case, head_dim=128, block_size=16, dtype="bfloat16")
CASES = (
    SHAPE(name="decode", query_lens=(1, 1, 1), kv_lens=(5, 16, 130)),
    SHAPE(name="mixed", query_lens=(1, 20, 1, 3), kv_lens=(40, 20, 1, 90)),
    SHAPE(name="window", query_lens=(1, 30), kv_lens=(100, 70), window=20),
    SHAPE(name="soft-cap", query_lens=(1, 12), kv_lens=(40, 12), soft_cap=5.0),
)
WORK = Work(batch=3, length=64, num_heads=8, num_kv_heads=2, head_dim=64, block_size=8, query_len=1)


def same(out, expected) -> None:
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=1e-2, rtol=1e-2
    )


def theirs(function, arguments: dict):
    """JAX's function for arguments of ours: no padding, K and V in the pool already."""
    names = ("kv_lens", "block_table", "query_starts")
    rows = [np.asarray(arguments[name]) for name in names]  # JAX's definition slices by them
    rows.append(np.array([len(arguments["kv_lens"])], np.int32))
    options = dict(
        sm_scale=arguments["scale"],
        sliding_window=arguments["window"],
        soft_cap=arguments["soft_cap"],
    )
    attend = jax.jit(lambda q, pool: function(q, pool, *rows, **options))
    return attend(arguments["q"], arguments["pool"])


def ours(arguments: dict, *, interpret):
    """Our kernel's attention, which writes the rows' last keys and values: those that are there already."""
    table, kv_lens, starts = (
        np.asarray(arguments[name]) for name in ("block_table", "kv_lens", "query_starts")
    )
    pool = np.asarray(arguments["pool"])
    kv = np.zeros((starts[-1], *pool.shape[2:]), pool.dtype)
    for row, kv_len in enumerate(kv_lens):
        for token in range(starts[row], starts[row + 1]):
            at = kv_len - (starts[row + 1] - token)
            kv[token] = pool[table[row, at // pool.shape[1]], at % pool.shape[1]]
    static = {name: arguments[name] for name in ("scale", "window", "soft_cap")}
    out, _ = jax.jit(partial(tpu.paged_attention, interpret=interpret, **static))(
        arguments["q"],
        jnp.asarray(kv[:, 0::2]),
        jnp.asarray(kv[:, 1::2]),
        to_tpu(arguments["pool"]),
        *(arguments[name] for name in ("block_table", "kv_lens", "query_starts")),
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_definition_is_that_of_jax(case):
    arguments = cases.arguments(case, poison=False)
    same(run(reference.paged_attention, arguments), theirs(ref_ragged_paged_attention, arguments))


@pytest.mark.slow
def test_our_kernel_does_what_jax_defines():
    arguments = cases.arguments(CASES[1], poison=False)
    out = ours(arguments, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    same(out, theirs(ref_ragged_paged_attention, arguments))


@pytest.mark.tpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_kernels_agree_on_a_tpu(case):
    arguments = cases.arguments(replace(case, block_size=32), poison=False)
    same(ours(arguments, interpret=False), theirs(ragged_paged_attention, arguments))


def expected(given: attention_peers.Inputs, pool, scale: float) -> np.ndarray:
    """The rows' attention, float64[R, H, D]."""
    table, kv_lens, starts = given.rows()
    names = dict(q=given.q, pool=pool, scale=scale)
    names |= dict(block_table=table, kv_lens=kv_lens, query_starts=starts)
    return np.concatenate(list(oracle.attention(names).values()))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("decode", [True, False])
def test_every_peer_takes_part_or_there_is_a_reason(platform, decode):
    found, absent = attention_peers.peers(
        replace(WORK, query_len=1 if decode else WORK.length), platform
    )
    names = [variants[0].name.split(",")[0] for variants in found] + list(absent)
    everybody = [attention_peers.RAGGED, attention_peers.TRITON, attention_peers.CUDNN]
    assert sorted(set(names) - set(everybody)) == sorted(
        {
            "cpu": ["our XLA path"],
            "gpu": ["our GPU kernel", "our XLA path"],
            "tpu": ["our TPU kernel", "our XLA path"],
        }[platform]
    )
    assert set(everybody) <= set(names) and len(names) == len(set(names))
    assert all("needs" in reason or "decoding only" in reason for reason in absent.values())


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("decode", [True, False])
def test_every_peer_takes_what_it_is_given(platform, decode, monkeypatch):
    """In shapes, for devices that are not here; cuDNN asks for its own."""
    query_len = 1 if decode else 512
    work = replace(WORK, query_len=query_len, head_dim=128, block_size=128, length=512)
    given = attention_peers.inputs(work, num_pools=1)
    # JAX's kernel for TPUs asks the device that is here for its sizes.
    monkeypatch.setattr(tuned_block_sizes, "get_tpu_version", lambda: 6)
    monkeypatch.setattr(tuned_block_sizes, "get_device_name", lambda *_: "TPU v6e")
    found, _ = attention_peers.peers(work, platform)
    peers = {v[0].name: v[0] for v in found if v[0].name != attention_peers.CUDNN}
    if unsupported_jax() and platform == "gpu":
        with pytest.raises(NotImplementedError, match="jax"):
            ours_gpu = peers.pop(attention_peers.OURS["gpu"])
            jax.eval_shape(ours_gpu.attend, given.q, given.pools[0], *given.rows())
    for peer in peers.values():
        (kv,) = peer.kv(given)
        out, same_kv = jax.eval_shape(peer.attend, given.q, kv, *given.rows())
        assert (out.shape, out.dtype) == (given.q.shape, given.q.dtype)
        assert jax.tree.map(jnp.shape, same_kv) == jax.tree.map(jnp.shape, kv)


@pytest.mark.slow
def test_triton_is_given_what_we_compute():
    given = attention_peers.inputs(WORK, num_pools=2)
    peers = attention_peers.triton(WORK, interpret=True)
    assert len(peers) > 1
    for peer in peers[:1]:
        kv = peer.kv(given)[1]
        out, _ = peer.attend(given.q, kv, *given.rows())
        # It has no scale: the same as ours with a scale of 1.
        same(out, expected(given, given.pools[1], 1.0))


@pytest.mark.slow
def test_contiguous_keys_are_those_of_the_pool():
    given = attention_peers.inputs(WORK, num_pools=1)
    k, v = attention_peers.contiguous(WORK, given.pools[0], given.table)
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(given.q[:, None], k, v, scale=WORK.scale)[:, 0]
    same(out, expected(given, given.pools[0], WORK.scale))


@pytest.mark.slow
@pytest.mark.parametrize("decode", [True, False])
def test_xla_computes_what_is_timed(decode):
    work = replace(WORK, query_len=1 if decode else 24, length=24)
    given = attention_peers.inputs(work, num_pools=1)
    ((peer,), *_), _ = attention_peers.peers(work, "cpu")
    out, _ = peer.attend(given.q, given.pools[0], *given.rows())
    same(out, expected(given, given.pools[0], work.scale))


def test_bytes_and_operations_are_those_of_the_formula():
    work = Work(
        batch=4,
        length=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        block_size=64,
        query_len=2048,
    )
    # Two products of two operations each, for every pair of a query and a key up to it.
    pairs = sum(range(1, 2049))
    assert work.flops == 4 * 16 * pairs * 128 * 2 * 2
    many = replace(work, batch=64, length=4096, query_len=1)
    assert many.kv_bytes == 64 * 4096 * 2 * 2 * 128 * 2 and many.num_tokens == 64
    assert many.num_blocks == 64 * 64 + 1 and math.isclose(many.scale, 128**-0.5)
    # With a scale and a zero of two bytes each for every head's K and V.
    of_head = {"int8": 128 + 4, "int4": 64 + 4, "fp8_e4m3": 128}
    for format, size in of_head.items():
        assert replace(many, format=format).kv_bytes == 64 * 4096 * 2 * 2 * size
    last = replace(work, query_len=100)
    assert last.num_tokens == 400 and last.flops == 4 * 16 * sum(range(1949, 2049)) * 128 * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_float64_agrees_with_what_the_definition_is_held_against(case):
    """NumPy's, `TestReference`, so that there is nothing to compile."""
    arguments = cases.arguments(case)
    out = dense_attention(case, arguments)
    error = oracle.worst_row(out, arguments["query_starts"], oracle.attention(arguments))
    assert error <= 1e-6


@pytest.mark.slow
def test_float64_knows_sinks_and_single_rows():
    arguments = cases.arguments(CASES[1])
    with_sinks = arguments | {"sinks": jnp.asarray([-1.0, 0.5, 3.0, 1.0])}
    out = run(reference.paged_attention, with_sinks)
    some = oracle.attention(with_sinks, (1, 3), queries=2)
    assert {row: len(queries) for row, queries in some.items()} == {1: 2, 3: 2}
    assert oracle.worst_row(out, arguments["query_starts"], some) < 1e-2
    plain = oracle.attention(arguments, (1, 3), queries=2)
    assert oracle.worst_row(out, arguments["query_starts"], plain) > 0.1


@pytest.mark.slow
def test_a_wrong_row_is_seen_and_so_is_nan():
    arguments = cases.arguments(CASES[1])
    out = run(reference.paged_attention, arguments)
    want, starts = oracle.attention(arguments), arguments["query_starts"]
    # The row of one token, whose share of all results is small.
    out[0] *= 1.05
    assert oracle.worst_row(out, starts, want) == pytest.approx(0.05, abs=0.01)
    out[0, 0, 0] = np.nan
    assert oracle.worst_row(out, starts, want) == math.inf


@pytest.mark.slow
def test_a_tpu_kernels_writes_are_part_of_what_is_checked():
    """The slots that `kernels._writing` works out are those of the new tokens, and no padding token has one."""
    from jaxpage.bench import kernels

    case = replace(CASES[1], num_padding_tokens=2)
    arguments = cases.arguments(case)
    _, given, written = kernels._writing(lambda **_: (None,), arguments, {})
    k, v = given["k"], given["v"]
    slots = []
    for row, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        for at in range(kv_len - query_len, kv_len):
            block = int(arguments["block_table"][row, at // case.block_size])
            slots.append(block * case.block_size + at % case.block_size)
    count = sum(case.query_lens)
    wanted = write_kv(arguments["pool"], k[:count], v[:count], jnp.asarray(slots, jnp.int32))
    np.testing.assert_array_equal(
        np.asarray(written["pool"], np.float32), np.asarray(wanted, np.float32)
    )
