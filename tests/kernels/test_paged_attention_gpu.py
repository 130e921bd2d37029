"""The Mosaic GPU kernels of paged attention against the definition: interpreted anywhere, and for real with `-m gpu`.

The interpreter needs jax >= 0.11.2 (Python 3.12): with an older one there is nothing to collect, and CI has an
environment for it. It checks every access against its buffer, fills fresh memory with NaN, and detects races.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.quantized import FORMATS, QuantizedPool
from pallas_kernels.paged_attention import cases, gpu, reference, xla
from pallas_kernels.paged_attention.cases import Case

__test__ = jax.__version_info__ >= (0, 11, 2)
pytestmark = [
    pytest.mark.slow,
    # The interpreter multiplies with NumPy, and NaN stands in every slot of K beyond a row's length.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

SMALL = partial(Case, head_dim=64, dtype="bfloat16")
DECODE = (
    SMALL(
        name="block-edges",
        query_lens=(1,) * 9,
        kv_lens=(1, 15, 16, 17, 63, 64, 65, 128, 0),
    ),
    SMALL(name="splits", query_lens=(1,) * 4, kv_lens=(511, 512, 513, 1100), block_size=32),
    SMALL(name="window", query_lens=(1,) * 4, kv_lens=(5, 20, 530, 200), window=20),
    SMALL(name="soft-cap", query_lens=(1,) * 2, kv_lens=(40, 130), soft_cap=5.0, block_size=8),
    SMALL(name="mqa-float16", query_lens=(1,), kv_lens=(70,), num_heads=9, num_kv_heads=1),
    SMALL(name="head-dim-96", query_lens=(1,), kv_lens=(70,), head_dim=96, dtype="float16"),
    SMALL(name="head-dim-128", query_lens=(1,), kv_lens=(70,), head_dim=128, block_size=64),
    SMALL(name="head-dim-256", query_lens=(1,), kv_lens=(70,), head_dim=256, block_size=128),
)
MIXED = (
    SMALL(
        name="mixed",
        query_lens=(1, 70, 0, 3, 1),
        kv_lens=(33, 200, 0, 90, 1),
        num_padding_tokens=70,
    ),
    SMALL(name="window", query_lens=(7, 150), kv_lens=(150, 400), window=40),
    SMALL(name="window-one", query_lens=(4,), kv_lens=(30,), window=1),
    SMALL(name="soft-cap", query_lens=(12,), kv_lens=(140,), soft_cap=5.0, block_size=64),
    SMALL(name="mha-of-a-few-tokens", query_lens=(6,), kv_lens=(6,), num_heads=2),
    SMALL(name="group-of-three", query_lens=(50,), kv_lens=(129,), num_heads=3, num_kv_heads=1),
    SMALL(name="head-dim-96", query_lens=(5,), kv_lens=(130,), head_dim=96, dtype="float16"),
    SMALL(name="head-dim-256", query_lens=(5,), kv_lens=(130,), head_dim=256, num_heads=2),
    SMALL(name="nothing", query_lens=(0, 0), kv_lens=(0, 0), num_padding_tokens=2),
)
QUANTISED = tuple(
    SMALL(name=format, query_lens=(1, 20, 0), kv_lens=(80, 140, 0), window=100, format=format)
    for format in FORMATS
)


def interpreter(**options):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(**options)


def run(function, arguments, **options):
    static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
    arrays = {k: v for k, v in arguments.items() if k not in static}
    return np.asarray(jax.jit(partial(function, **static, **options))(**arrays), np.float64)


def padded(case: Case) -> Case:
    """With a query for each row of no length, as a step that only decodes has them."""
    return replace(case, num_padding_tokens=len(case.query_lens) - sum(case.query_lens))


def expected(arguments, implementation=reference):
    """By the definition or what is tested against it, with q and pool in float32."""
    wide = {"q": arguments["q"].astype(jnp.float32), "pool": arguments["pool"]}
    if not isinstance(wide["pool"], QuantizedPool):
        wide["pool"] = wide["pool"].astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        return run(implementation.paged_attention, arguments | wide)


def expected_with_sinks(case: Case, arguments, sinks):
    """NumPy in float64, row by row: a sink is one more score, of a key whose value is zero."""
    pool, q, table = (np.asarray(arguments[k]) for k in ("pool", "q", "block_table"))
    out, first = np.zeros(q.shape), 0
    group = case.num_heads // case.num_kv_heads
    for row, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        kv = pool[table[row]].reshape(-1, *pool.shape[2:])[:kv_len].astype(np.float64)
        for i in range(query_len):
            keys = kv[: kv_len - query_len + i + 1]
            for head in range(case.num_heads):
                k, v = keys[:, head // group * 2], keys[:, head // group * 2 + 1]
                scores = k @ q[first + i, head].astype(np.float64) * arguments["scale"]
                weights = np.exp(np.append(scores, sinks[head]) - scores.max())
                out[first + i, head] = weights[:-1] @ v / weights.sum()
        first += query_len
    return out


def check(case: Case, result, want) -> None:
    """2-byte products and probabilities: 5e-3 of the norm. And nothing but finite numbers anywhere."""
    assert np.isfinite(result).all()
    result, want = (x[: sum(case.query_lens)] for x in (result, want))
    np.testing.assert_allclose(result, want, atol=4e-2)
    assert np.linalg.norm(result - want) <= 5e-3 * np.linalg.norm(want)


def decoding(case: Case) -> Case:
    """With a query for each row, also for those without keys, as a step that only decodes has them."""
    lens = tuple(int(n > 0) for n in case.kv_lens)
    return replace(case, query_lens=lens, num_padding_tokens=len(lens) - sum(lens))


@pytest.mark.parametrize("case", DECODE, ids=lambda c: c.name)
def test_rows_with_one_query(case):
    arguments = cases.arguments(decoding(case))
    options = dict(one_query_per_row=True, interpret=interpreter())
    check(decoding(case), run(gpu.paged_attention, arguments, **options), expected(arguments))


@pytest.mark.parametrize("case", MIXED + QUANTISED, ids=lambda c: c.name)
def test_rows_of_any_number_of_queries(case):
    arguments = cases.arguments(case)
    result = run(gpu.paged_attention, arguments, interpret=interpreter())
    check(case, result, expected(arguments))


def test_sinks_take_their_share_of_every_softmax():
    case = SMALL(name="", query_lens=(1, 5, 1), kv_lens=(530, 70, 1))
    arguments = cases.arguments(case)
    sinks = np.linspace(-2, 6, case.num_heads, dtype=np.float32)
    result = run(gpu.paged_attention, arguments | {"sinks": sinks}, interpret=interpreter())
    check(case, result, expected_with_sinks(case, arguments, sinks))


@pytest.mark.parametrize("format", [None, "int8"])
def test_no_two_warpgroups_touch_the_same_memory_unordered(format, monkeypatch, capsys):
    """More tiles than stages, both kernels, rows that share a program. wgmma reads as a load would."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wgmma = gpu_callbacks.wgmma

    def checked(**operands):  # the interpreter's own leaves wgmma out when it looks for races
        where = {k: operands[k] for k in ("token", "mesh_location", "thread", "source_info")}
        for side in "ab":
            key, transforms = (
                operands[f"{side}_{what}"] for what in ("allocation_key_as_array", "transforms")
            )
            gpu_callbacks._get(allocation_key_as_array=key, transforms=transforms, **where)
        # Unlike a load's, what wgmma has read may be copied over without a fence.
        gpu_callbacks._get_shared_memory().commit_smem(operands["thread"])
        return wgmma(**operands)

    monkeypatch.setattr(gpu_callbacks, "wgmma", checked)
    case = SMALL(name="", query_lens=(1, 70, 1), kv_lens=(500, 400, 40), window=450, format=format)
    arguments = cases.arguments(case)
    result = run(gpu.paged_attention, arguments, interpret=interpreter(detect_races=True))
    # Not `get_races().races_found`, which knows the last kernel only.
    assert "RACE DETECTED" not in capsys.readouterr().out
    check(case, result, expected(arguments))


def test_a_row_does_not_depend_on_its_batch(monkeypatch):
    """Bit for bit: alone in a narrow table, and among others in a wide one, by programs with several rows each."""
    case = SMALL(name="", query_lens=(1, 1, 20), kv_lens=(600, 30, 90))
    arguments = cases.arguments(case)
    monkeypatch.setattr(gpu, "NUM_SMS", 1)
    together = run(gpu.paged_attention, arguments, interpret=interpreter())
    for row, queries in ((0, slice(0, 1)), (2, slice(2, 22))):
        width = -(-case.kv_lens[row] // case.block_size)
        alone = arguments | {
            "q": arguments["q"][queries],
            "block_table": arguments["block_table"][row : row + 1, :width],
            "kv_lens": arguments["kv_lens"][row : row + 1],
            "query_starts": jnp.asarray([0, queries.stop - queries.start], jnp.int32),
        }
        result = run(gpu.paged_attention, alone, interpret=interpreter())
        np.testing.assert_array_equal(result, together[queries])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "q is float32 and the pool float32; they must be bfloat16"),
        (dict(head_dim=80), "head dim 80 is none of"),
        (dict(block_size=4), "block size 4 is neither"),
        (dict(num_heads=128, num_kv_heads=1), "128 query heads per KV head are more than 64"),
        (dict(format="int8", num_kv_heads=1), "1 KV heads are odd"),
        (dict(format="int4", head_dim=96), "head dim 96 in int4 does not fit"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_the_kernels_cannot_do_they_refuse_with_the_reason(change, reason):
    arguments = cases.arguments(replace(DECODE[0], query_lens=(1,), kv_lens=(3,), **change))
    with pytest.raises(NotImplementedError, match=reason):
        gpu.paged_attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*map(decoding, DECODE), *MIXED, *QUANTISED], ids=str)
def test_on_a_real_gpu(case):
    """As compiled: probabilities in registers, accumulators that begin at a value, approximate exp2 and division."""
    arguments = cases.arguments(case)
    check(case, run(gpu.paged_attention, arguments), expected(arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (32, 8)])
@pytest.mark.parametrize("query_len", [1, 300])
def test_on_a_real_gpu_at_the_size_of_a_model(heads, kv_heads, query_len):
    """Many programs an SM at once, twice: the second result is the first, bit for bit."""
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=128)
    lens = tuple(range(300, 4300, 250))
    case = SMALL(name="", query_lens=(query_len,) * len(lens), kv_lens=lens, **shape)
    arguments = cases.arguments(case)
    result = run(gpu.paged_attention, arguments)
    np.testing.assert_array_equal(run(gpu.paged_attention, arguments), result)
    check(case, result, expected(arguments, xla))
