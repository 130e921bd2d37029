"""Every implementation of paged attention against its definition, on pools poisoned with NaN."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxpage.batch import StepBatch
from jaxpage.device import Device
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models.attention import DenseAttention
from jaxpage.ops import attention
from jaxpage.ops.attention import Heads, PagedAttention, choose, max_blocks
from jaxpage.parallel.heads import share_heads
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels import hopper, tile_sizes, tuning
from pallas_kernels.kv_write.quantized import FORMATS, QuantizedPool
from pallas_kernels.paged_attention import (
    cases,
    gpu_layout,
    reference,
    tpu,
    tpu_layout,
    tune,
    xla,
)
from tests.kernels.paged_attention import PagedAttentionTests, case_of, dense_attention, run

# Cases whose pools differ in shape, or that mask keys. Those that differ only in their rows read the same tiles.
_QUANTIZED = [
    replace(case_of(name), name=f"{name}-{format}", format=format)
    for name, format in zip(
        (
            *("decode-long", "odd-head-dim", "block-size-4", "mqa"),
            *("block-size-64", "prompt-of-many-tiles", "window-one", "sinks-of-a-window"),
        ),
        2 * FORMATS,
        strict=True,
    )
]

FAST = ("block-edges", "mixed", "empty-rows-between", "sinks-of-a-window", "bfloat16")


class TestReference(PagedAttentionTests):
    cases = (*cases.SMALL, *cases.AHEAD)
    fast = ("mixed", "sinks-of-a-window", "pictures")
    test_one_query_per_row_is_the_same = None  # it has no such option

    def attend(self, case, arguments):
        return run(reference.paged_attention, arguments)


class TestXLA(PagedAttentionTests):
    cases = (*cases.SMALL, *cases.AHEAD)
    fast = (*FAST, "pictures-beyond-a-window")

    def attend(self, case, arguments, **options):
        return run(xla.paged_attention, arguments, **options)

    @pytest.mark.slow
    @pytest.mark.parametrize("quantised", _QUANTIZED, ids=lambda c: c.name)
    def test_quantised_pools_of_other_sizes_are_read_alike(self, quantised):
        self.check(quantised)


def test_a_longer_table_costs_no_temporaries():
    """The loop's tile, not the table, bounds the memory: 0.5 MB at 64 blocks and at 4096."""
    case = cases.Case(name="", query_lens=(1, 1), kv_lens=(100, 100))
    arguments = cases.arguments(case)
    temporaries = []
    for width in (64, 4096):
        arguments["block_table"] = np.zeros((2, width), np.int32)
        static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
        arrays = {k: v for k, v in arguments.items() if k not in static}
        compiled = jax.jit(partial(xla.paged_attention, **static)).lower(**arrays).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] <= temporaries[0] + 4 * 2 * 4096 * 4  # the padded table itself
    assert temporaries[1] < 1_000_000


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_devices"),
    [
        pytest.param(4, 2, 2, marks=pytest.mark.slow),  # each device has a KV head
        pytest.param(8, 1, 2, marks=pytest.mark.slow),  # both have the only one
        (14, 2, 4),  # with padding: 16 query heads
        pytest.param(
            6, 3, 4, marks=pytest.mark.slow
        ),  # a KV head of padding, for one of the devices alone
        pytest.param(6, 3, 8, marks=pytest.mark.slow),
    ],
)
def test_heads_are_shared_by_several_devices(num_heads, num_kv_heads, num_devices):
    """As on one device, where the definition is right."""
    case = cases.Case(
        name="",
        query_lens=(1, 9, 1),
        kv_lens=(40, 20, 1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    arguments = cases.arguments(case, poison=False)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (TENSOR,))
    pool = arguments["pool"]
    rng = np.random.default_rng(0)
    shape = (sum(case.query_lens), num_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in "kv")
    table, starts = np.asarray(arguments["block_table"]), np.cumsum((0, *case.query_lens))
    slots = np.concatenate(
        [
            table[row, position // case.block_size] * case.block_size + position % case.block_size
            for row, (queries, keys) in enumerate(zip(case.query_lens, case.kv_lens, strict=True))
            for position in [np.arange(keys - queries, keys)]
        ]
    )
    unused = np.zeros(0, np.int32)
    batch = StepBatch(
        slots=unused,
        query_starts=starts.astype(np.int32),
        kv_lens=arguments["kv_lens"],
        token_ids=unused,
        positions=unused,
        slot_mappings=slots.astype(np.int32)[None],
        block_tables=table[None],
    )

    spec = KVPoolSpec(
        num_arrays=1,
        num_blocks=pool.shape[0],
        block_size=case.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=case.head_dim,
        dtype=pool.dtype,
    )

    def attend(mesh, spec, pool, q):
        options = dict(spec=spec, one_query_per_row=False, mesh=mesh)
        attention = PagedAttention([pool], batch, (Location(0, 0),), **options)
        options = dict(scale=arguments["scale"], window=None, soft_cap=None)
        return attention(0, q, k, v, **options), attention.kv_pool[0]

    want, written = jax.jit(partial(attend, None, spec))(pool, arguments["q"])
    np.testing.assert_allclose(
        want, dense_attention(case, arguments | {"pool": written}), atol=2e-6, rtol=2e-6
    )
    shares = share_heads(num_heads, num_kv_heads, num_devices)
    heads = shares.of_pool
    of_each = np.asarray(pool).reshape(*pool.shape[:2], num_kv_heads, -1)
    missing = shares.padded_kv_heads - num_kv_heads
    of_each = np.pad(of_each, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=np.nan)
    of_each = np.repeat(of_each, heads // shares.padded_kv_heads, 2)
    of_each = of_each.reshape(*pool.shape[:2], 2 * heads, -1)
    shared = replace(spec, num_kv_heads=heads, sharded=True)
    result, _ = jax.jit(partial(attend, mesh, shared))(of_each, arguments["q"])
    np.testing.assert_allclose(result, want, atol=2e-6)


@pytest.mark.slow
def test_a_model_without_a_pool_attends_alike():
    case = cases.Case(name="", query_lens=(19,), kv_lens=(19,), window=9, soft_cap=5.0)
    arguments = cases.arguments(case)
    blocks = np.asarray(arguments["pool"])[np.asarray(arguments["block_table"][0])]
    kv = blocks.reshape(-1, case.num_kv_heads, 2, case.head_dim)[:19]
    options = {name: arguments[name] for name in ("scale", "window", "soft_cap")}
    attend = DenseAttention(jnp.arange(19, dtype=jnp.int32))
    attend = jax.jit(partial(attend, 0, **options))
    result = attend(arguments["q"], kv[:, :, 0], kv[:, :, 1])
    np.testing.assert_allclose(result, dense_attention(case, arguments), atol=2e-6, rtol=2e-6)


def spec_of_a_gpu(**changes) -> KVPoolSpec:
    fields = dict(num_arrays=2, num_blocks=0, block_size=64, num_kv_heads=2, head_dim=64)
    return KVPoolSpec(**fields, dtype=jnp.dtype(jnp.bfloat16), platform="gpu", **changes)


HOPPER = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")
TPU, CPU = Device(platform="tpu", kind="TPU v6 lite"), Device(platform="cpu")


@pytest.mark.parametrize("device", [HOPPER, TPU], ids=["hopper", "tpu"])
def test_no_kernel_sees_ahead(device, monkeypatch, good_ptxas):
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    spec = replace(spec_of_a_gpu(), platform=device.platform, head_dim=128, block_size=128)
    asked = dict(heads=(Heads(share_heads(2, 2, 1), 128),), table=(4, 9))
    assert choose(spec, device, **asked).name == device.platform.replace("gpu", "hopper")
    choice = choose(spec, device, **asked, sees_ahead=True)
    assert (choice.name, choice.chosen) == ("xla", spec)
    assert 'limit_mm_per_prompt={"image": 0}' in (choice.reason or "")


@pytest.fixture
def good_ptxas(monkeypatch):
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 1, 80))


@pytest.mark.parametrize(
    ("changes", "asked", "capability", "reason"),
    [
        ({}, {}, "9.0", None),
        (dict(num_kv_heads=4, sharded=True, format="int8"), dict(num_devices=2), "9.0", None),
        ({}, {}, "8.0", r"of compute capability 9\.0; this device's is 8\.0"),
        ({}, {}, None, "this device's is unknown"),
        ({}, dict(num_heads=130), "9.0", "65 query heads per KV head are more than 64"),
        (
            dict(num_kv_heads=2, sharded=True, format="int8"),
            dict(num_devices=2),
            "9.0",
            "KV heads are odd",
        ),
    ],
)
def test_hopper_gpus_have_a_kernel_and_a_reason_where_it_cannot_serve(
    changes, asked, capability, reason, good_ptxas
):
    spec = replace(spec_of_a_gpu(), **changes)
    asked = dict(num_devices=1, num_heads=8, table=(4, 9)) | asked
    shares = share_heads(asked.pop("num_heads"), spec.num_kv_heads, asked.pop("num_devices"))
    heads = (Heads(shares, spec.head_dim),)
    choice = choose(spec, replace(HOPPER, compute_capability=capability), heads=heads, **asked)
    oldest, newest = hopper.JAX_VERSIONS
    if not oldest <= jax.__version_info__ < newest and capability == "9.0":
        reason = r"the kernels need jax >= 0\.11\.2 and < 0\.13, and this is .*install"
    if reason is None:
        sizes = tile_sizes.tuned_sizes("paged_attention", "gpu", "NVIDIA H200")
        assert choice.reason is None
        assert choice.chosen == replace(spec, attention="hopper", kernel_sizes=sizes)
    else:
        assert choice.chosen == spec and choice.name == "xla"
        assert choice.reason is not None and re.search(reason, choice.reason)


@pytest.mark.parametrize(
    ("format", "reason"),
    [(None, None), ("int8", "layers differ in their KV heads, and the pool is int8")],
)
def test_hopper_s_kernels_read_parts_of_pools_in_two_bytes(format, reason, monkeypatch, good_ptxas):
    """As Gemma 4's: layers with 8 heads of 256, and with 2 of 512."""
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    spec = replace(spec_of_a_gpu(), num_kv_heads=8, head_dim=256, format=format)
    heads = (Heads(share_heads(16, 2, 1), 512), Heads(share_heads(16, 8, 1), 256))
    choice = choose(spec, HOPPER, heads=heads, table=(4, 9))
    assert choice.name == ("hopper" if reason is None else "xla") and choice.reason == reason


def test_an_assembler_that_miscompiles_is_a_reason(monkeypatch):
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    monkeypatch.setattr(hopper, "find_ptxas", lambda: Path("/cuda/bin/ptxas"))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 0, 88))
    choice = choose(spec_of_a_gpu(), HOPPER, heads=(Heads(share_heads(8, 2, 1), 64),), table=(4, 9))
    assert choice.name == "xla" and "ptxas 13.0.88 (/cuda/bin/ptxas) mis" in (choice.reason or "")


@pytest.mark.parametrize(("num_devices", "rows"), [(1, 4), (2, 8), (6, 4)])
def test_a_tpu_s_share_of_scales_fills_registers(num_devices, rows):
    """Of six, three or one head a device: 24, 24 with unused ones, or 4 rows."""
    spec = replace(spec_of_a_gpu(), platform="tpu", num_kv_heads=6, head_dim=128, block_size=128)
    spec = replace(spec, format="int8", sharded=num_devices > 1)
    heads = (Heads(share_heads(12, 6, num_devices), spec.head_dim),)
    choice = choose(spec, TPU, heads=heads, table=(4, 9))
    assert choice.reason is None and choice.chosen.scale_rows == rows
    pool = choice.chosen.abstract()[0]
    assert isinstance(pool, QuantizedPool) and pool.scale_zero is not None
    assert pool.scale_zero.shape == (0, 6 * rows, 128)


def test_a_cpu_has_no_kernel_and_needs_no_reason():
    spec = spec_of_a_gpu()
    heads = (Heads(share_heads(2, 2, 1), spec.head_dim),)
    choice = choose(spec, CPU, heads=heads, table=(4, 9))
    assert choice.chosen == spec and choice.reason is None


def test_a_pool_has_no_more_blocks_than_its_attention_can_address():
    """A TPU's ids have 2 bytes; elsewhere slots are int32."""
    spec = spec_of_a_gpu()
    assert max_blocks(replace(spec, layout="tpu")) == 1 << 16
    assert max_blocks(spec) * spec.block_size < 1 << 31


SMALL, WIDE = gpu_layout.Division.of(128, 8), gpu_layout.Division.of(256, 64)
items_of = jax.jit(gpu_layout.items_of, static_argnums=(2, 3, 4, 5))


rows_and_divisions = given(
    kv_lens=st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    window=st.sampled_from([None, 1, 512, 513, 514, 3000]),
    division=st.sampled_from([SMALL, WIDE]),
    num_kv_heads=st.sampled_from([1, 8, 16]),
    wanted=st.booleans(),
)


@rows_and_divisions
@settings(max_examples=20, deadline=None)
def test_the_items_of_rows_are_all_that_a_query_sees_and_within_their_number(
    kv_lens, window, division, num_kv_heads, wanted
):
    check_items(kv_lens, window, division, num_kv_heads, wanted)


@pytest.mark.slow
@rows_and_divisions
@settings(max_examples=60, deadline=None)
def test_the_items_of_rows_are_all_that_a_query_sees_in_depth(
    kv_lens, window, division, num_kv_heads, wanted
):
    check_items(kv_lens, window, division, num_kv_heads, wanted)


def check_items(kv_lens, window, division, num_kv_heads, wanted):
    """Cut where nothing but the row says: every seen key once, and each item of a row in its own place."""
    num_keys = 5120
    of_rows = (np.array(kv_lens, np.int32), np.full(len(kv_lens), wanted))
    args = (*of_rows, division, num_kv_heads, num_keys, window)
    items = jax.tree.map(np.asarray, items_of(*args))
    assert (items.keys == division.keys).all()
    most = division.most_items(len(kv_lens), num_kv_heads, num_keys, window)
    assert items.starts[-1] <= items.row.size == most
    lows = [max(0, kv_len - (window or kv_len)) for kv_len in kv_lens]
    in_group = division.parts
    groups = [
        len({key // (in_group * division.keys) for key in range(low, kv_len)})
        for low, kv_len in zip(lows, kv_lens, strict=True)
    ]
    if sum(groups) * num_kv_heads >= gpu_layout.ENOUGH_GROUPS:
        in_group = 1
    assert items.in_group.tolist() == [in_group]
    size = division.keys * division.parts // in_group
    for row, (low, kv_len) in enumerate(zip(lows, kv_lens, strict=True)):
        of_row = slice(items.starts[row], items.starts[row + 1])
        assert (items.row[of_row] == row).all()
        cuts = range(low // size * size, max(kv_len, int(wanted)), size)
        assert items.low[of_row].tolist() == [max(cut, low) for cut in cuts]
        assert items.high[of_row].tolist() == [min(cut + size, kv_len) for cut in cuts]
        assert items.in_first_group[row] == in_group - low // size % in_group


@pytest.mark.parametrize("num_keys", [200_000, 262_144])
def test_long_rows_have_longer_parts_by_their_own_length(num_keys):
    kv_lens = np.array([0, 65_536, 65_537, 131_072, 131_073, 200_000], np.int32)
    for division, keys, counts in (
        (SMALL, 256, [1, 32, 17, 32, 17, 25]),  # groups
        (WIDE, 512, [1, 128, 65, 128, 65, 98]),
    ):
        found = items_of(kv_lens, np.ones(6, bool), division, 8, num_keys, None)
        found = jax.tree.map(np.asarray, found)
        last = found.starts[1:] - 1
        assert found.keys[last].tolist() == [n * keys for n in (1, 1, 2, 2, 4, 4)]
        assert np.diff(found.starts).tolist() == counts
        assert found.row.size == 6 * max(counts)
        sizes = found.keys * division.parts
        assert (found.low[last] == (np.array(counts) - 1) * sizes[last]).all()


KINDS = {
    "gpu": ("NVIDIA H200", gpu_layout.TileSizes(tile_kv=64, stages=3, programs_per_sm=2)),
    "tpu": ("TPU v6 lite", tpu_layout.TileSizes(tile_rows=128, tile_kv=1024)),
}


@pytest.mark.parametrize("platform", KINDS)
def test_sizes_are_those_that_were_measured_on_a_kind_of_device(platform, tmp_path):
    kind, sizes = KINDS[platform]
    assert tile_sizes.tuned_sizes("paged_attention", platform, kind, tmp_path) == type(sizes)()
    path = tile_sizes.write(kind, sizes, {"tile_kv=64": 1e-3}, tmp_path)
    assert tile_sizes.tuned_sizes("paged_attention", platform, kind, tmp_path) == sizes
    assert (
        tile_sizes.tuned_sizes("paged_attention", platform, f"{kind} PCIe", tmp_path)
        == type(sizes)()
    )
    path.write_text(path.read_text().replace("tile_kv", "tile"))
    with pytest.raises(ValueError, match=f"{path.name}: sizes are"):
        tile_sizes.tuned_sizes("paged_attention", platform, kind, tmp_path)


def test_sizes_in_the_folder_are_those_of_their_kind():
    """What was really measured, if anything."""
    folder = tile_sizes.folder_of("paged_attention")
    for path in folder.glob("*.json"):
        kind = json.loads(path.read_text())["device_kind"]
        assert path == tile_sizes.path_of(kind, folder)
        assert (
            tile_sizes.tuned_sizes(
                "paged_attention", "tpu" if kind.startswith("TPU") else "gpu", kind
            ).tile_kv
            > 0
        )


@pytest.mark.parametrize("platform", KINDS)
def test_a_pool_goes_with_the_sizes_of_its_device(platform, tmp_path, monkeypatch, good_ptxas):
    kind, sizes = KINDS[platform]
    tile_sizes.write(kind, sizes, {}, tmp_path)
    monkeypatch.setattr(attention, "tuned_sizes", partial(tile_sizes.tuned_sizes, folder=tmp_path))
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    spec = replace(spec_of_a_gpu(), platform=platform)
    device = Device(platform=platform, kind=kind, compute_capability="9.0")
    heads = (Heads(share_heads(2, 2, 1), spec.head_dim),)
    choice = choose(spec, device, heads=heads, table=(4, 9))
    assert choice.reason is None
    read = {"gpu": dict(attention="hopper"), "tpu": dict(attention="tpu", layout="tpu")}[platform]
    assert choice.chosen == replace(spec, kernel_sizes=sizes, **read)


def test_tuning_takes_the_fastest_of_what_fits_a_gpu(monkeypatch):
    def seconds(platform, sizes, work):
        if sizes.tile_kv * sizes.stages > 256:
            raise ValueError("Mosaic GPU kernel exceeds available shared memory")
        keys = sizes.tile_kv * sizes.stages
        return abs(sizes.programs_per_sm - 2) + 100.0 / keys + 1e-3 * sizes.tile_kv

    monkeypatch.setattr(tune, "_seconds", seconds)
    best, found = tune.tune("gpu")
    assert best == gpu_layout.TileSizes(programs_per_sm=2, tile_kv=64, stages=4)
    assert found["programs_per_sm=1"] > found["programs_per_sm=2"]
    assert "tile_kv=128 stages=4" not in found


def test_tuning_takes_the_fastest_of_a_tpu(monkeypatch):
    """By a clock that a launch moves: the kernel and its device are not here."""
    now, chosen = [0.0], []

    def attend(q, k, v, pool, *, sizes, **options):
        chosen.append(sizes)
        return q, pool

    def block_until_ready(launched):
        now[0] += 1e-3 * abs(chosen[-1].tile_kv - 1024) + 1e-3 * abs(chosen[-1].tile_rows - 512)
        now[0] += 1e-5 * chosen[-1].head_rows + 1e-8 * chosen[-1].tile_bytes
        return launched

    small = {"q": jnp.zeros((2, 4, 128)), "pool": jnp.zeros((1, 1, 4, 128))}
    monkeypatch.setattr(tune, "arguments", lambda work, block_size: dict(small))
    monkeypatch.setattr(tune.jax, "jit", lambda function, **_: function)
    monkeypatch.setattr(tuning.jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(tpu, "paged_attention", attend)
    best, found = tune.tune("tpu")
    wanted = dict(tile_rows=512, head_rows=2048, tile_kv=1024, tile_bytes=2 << 20)
    assert best == tpu_layout.TileSizes(**wanted)
    assert len(found) == 6 + 8


def test_tuning_refuses_a_machine_without_such_a_device():
    with pytest.raises(SystemExit, match=r"nothing to tune on cpu \(cpu\)"):
        tuning.tune_here(tune.tune, tile_sizes.folder_of("paged_attention"))


@pytest.mark.parametrize("platform", KINDS)
def test_what_is_tuned_is_what_a_kernel_takes(platform):
    """In shapes: rows, and queries within what they attend to."""
    fields = set(KINDS[platform][1].__dataclass_fields__)
    assert {name for _, values in tune.CANDIDATES[platform] for name in values} == fields
    for work in (*tune.DECODE, *tune.PREFILL):
        arrays = jax.eval_shape(lambda work=work: tune.arguments(work, tune.BLOCK_SIZE[platform]))
        assert arrays["q"].shape[0] == work.num_rows * work.query_len
        assert arrays["pool"].shape[0] == 1 + arrays["block_table"].size
        size = arrays["pool"].shape[1]
        assert 0 <= arrays["block_table"].shape[1] * size - work.kv_len < size
        if platform == "tpu":
            pool = jax.eval_shape(tpu_layout.to_tpu, arrays["pool"])
            table = arrays["block_table"].shape
            assert (
                tpu_layout.unsupported_reason(arrays["q"], pool, work.num_kv_heads, table) is None
            )
