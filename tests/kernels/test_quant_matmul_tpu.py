"""The TPU kernel of products with quantised weights, interpreted on the CPU, against the definition.

The interpreter simulates the pipeline's DMAs, fills uninitialised memory with NaN, and finds races.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.device import Device
from jaxpage.ops import matmul as ops
from pallas_kernels.quant_matmul import cases, reference, tpu, tpu_tile
from pallas_kernels.quant_matmul.cases import Case
from pallas_kernels.quant_matmul.quantized import quantize
from tests.kernels.quant_matmul import (
    QuantMatmulTests,
    case_of,
    scale_of_powers_of_two,
    zero_of_powers_of_two,
)

ONE_OF_EACH = ("int8", "int4", "fp8", "int8-rounded-x", "int8-groups", "fp8-groups")
# Inputs of weights with groups, in slices of LANES bytes: 11 of int4, which are 8 and 3 with few tokens, 6 and 5 with
# many; and 21 of 8 bits, which are 16 and 5, 11 and 10.
MANY_SLICES = {"int4": 22 * tpu.LANES, "int8": 21 * tpu.LANES, "fp8_e4m3": 21 * tpu.LANES}
INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@cache
def program(**options):
    return jax.jit(partial(tpu.quant_matmul, interpret=INTERPRETED, **options))


def run(x, weight, bias=None, **options) -> np.ndarray:
    """The kernel's result; no race was seen."""
    out = np.asarray(program(**options)(x, weight, bias=bias))
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    return out


class TestTPU(QuantMatmulTests):
    """Weights and x are not rounded, or weights only as they are here, so only the order of float32's sums differs."""

    fast, bound = ("int8", "int4", "fp8-groups-odd-number"), 2e-6

    def product(self, x, weight, *, round_x, **options):
        return run(x, weight, round_x=round_x, **options)

    def rounds_weight(self, case):
        return case.group_size is not None and case.num_tokens > tpu.LANES

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ONE_OF_EACH)
    def test_several_tiles_and_parts_of_tiles(self, name):
        """Two tiles of tokens and of outputs, the last ones with less than a tile in them, and two chunks."""
        sizes = tpu.TileSizes(tile_tokens=256)
        case = replace(case_of(name), num_tokens=300, num_out=700, num_in=tpu_tile.CHUNK + 256)
        self.check(case, sizes=sizes)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ["int4", "int4-symmetric", "int4-groups-of-32", "int8-groups", "fp8-groups"]
    )
    @pytest.mark.parametrize("num_tokens", [19, tpu.LANES, tpu.LANES + 1])
    def test_slices_that_do_not_fill_the_last_iteration(self, name, num_tokens):
        case = replace(case_of(name), num_tokens=num_tokens)
        self.check(replace(case, num_in=MANY_SLICES[case.format]))

    @pytest.mark.slow
    @pytest.mark.parametrize("group_size", [256, tpu_tile.CHUNK])
    @pytest.mark.parametrize("num_tokens", [19, 200])
    def test_groups_of_several_registers(self, group_size, num_tokens):
        case = replace(case_of("fp8-groups"), group_size=group_size, num_tokens=num_tokens)
        self.check(replace(case, num_in=3 * group_size))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ONE_OF_EACH)
    def test_bias_and_cast_come_last(self, name):
        self.check_what_comes_last(case_of(name))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ONE_OF_EACH)
    def test_a_row_is_the_same_to_the_bit_among_any_number_of_rows(self, name):
        exact = dict(scale=scale_of_powers_of_two, zero=zero_of_powers_of_two)
        self.check_rows_alone(case_of(name), **exact)
        if case_of(name).group_size is not None:
            many = (slice(0, tpu.LANES + 1), slice(9, 160))
            self.check_rows_alone(case_of(name), 300, many, **exact)


@pytest.mark.slow
def test_one_tile_of_x_at_a_time(monkeypatch):
    """Where that has more tokens than two have that fit."""
    case = replace(case_of("int4"), num_tokens=300)
    x, weight = cases.arguments(case)
    wanted = run(x, weight)
    monkeypatch.setattr(tpu, "X_BYTES", case.num_tokens * case.num_in * 2)
    assert tpu.tiles_of(x, weight, tpu.DEFAULT)[0] == 160
    with monkeypatch.context() as of_two:
        of_two.setattr(tpu, "_x_buffers", lambda *_: 2)
        assert tpu.tiles_of(x, weight, tpu.DEFAULT)[0] == 112
    one_at_a_time = jax.jit(partial(tpu.quant_matmul, interpret=INTERPRETED))
    np.testing.assert_array_equal(one_at_a_time(x, weight), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4", "fp8-groups"])
def test_sizes_change_no_bit(name):
    """With scales and zeros that are powers of two, as above. 300 tokens are one tile, two or three."""
    case = replace(case_of(name), num_tokens=300, num_out=600)
    case = replace(case, num_in=MANY_SLICES[case.format])
    x, weight = cases.arguments(case)
    scale, zero = scale_of_powers_of_two(weight), zero_of_powers_of_two(weight)
    weight = replace(weight, scale=scale, zero=zero)
    out = run(x, weight)
    for sizes in (
        tpu.TileSizes(tile_tokens=128, tile_out=512),
        tpu.TileSizes(tile_tokens=256, tile_out=128, least_tiles=1),
    ):
        np.testing.assert_array_equal(run(x, weight, sizes=sizes), out)


def test_tiles_fit_are_equally_large_and_of_few_tokens_there_are_several():
    """Where one tile of 128 outputs is all that fits, it is."""

    def tiles_of(num_tokens, num_in, num_out, sizes=tpu.DEFAULT, dtype=jnp.int8, group_size=None):
        zeros = jax.ShapeDtypeStruct((num_out, num_in), jnp.float32)
        weight = jax.eval_shape(partial(quantize, format="int8", group_size=group_size), zeros)
        return tpu.tiles_of(jax.ShapeDtypeStruct((num_tokens, num_in), dtype), weight, sizes)

    for given, wanted in (
        ((32, 3584, 37888), (32, 512)),
        ((32, 3584, 3584), (32, 256)),
        ((32, 3584, 896), (32, 128)),
        ((128, 3584, 896), (128, 512)),
        ((1100, 3584, 37888), (576, 512)),
        ((2048, 3584, 37888), (1024, 512)),
        ((2048, 18944, 3584), (512, 256)),
        ((2048, 28672, 8192), (512, 256)),
        ((2048, 49152, 8192), (256, 128)),
    ):
        assert tiles_of(*given) == wanted
    assert tiles_of(2048, 18944, 3584, dtype=jnp.bfloat16) == (256, 256)
    # With one buffer instead of two.
    assert tiles_of(2048, 18944, 3584, dtype=jnp.bfloat16, group_size=128) == (512, 256)
    assert tiles_of(384, 18944, 3584, dtype=jnp.bfloat16, group_size=128) == (384, 256)
    assert tiles_of(2048, 28672, 8192, tpu.TileSizes(tile_tokens=256, tile_out=1024)) == (256, 256)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "x is float32; the kernel reads bfloat16"),
        (dict(num_in=448), "448 inputs are no multiple of 128"),
        (dict(num_in=384, format="int4", group_size=64), "384 inputs are no multiple of 256"),
        (dict(format="int4", group_size=256), "groups have 256 inputs, none of"),
        (dict(num_in=65536, num_out=8), "65536 inputs of a tile do not fit into VMEM"),
        (dict(format="fp8_e4m3", round_x=True), "x is rounded for int8 weights"),
        (dict(group_size=128, round_x=True), "x is rounded for a scale per output"),
        (dict(group_size=64), "groups have 64 inputs, no multiple of 128 up to 4096"),
        (
            dict(num_in=8192, group_size=8192, num_out=8),
            "groups have 8192 inputs, no multiple of 128 up to 4096",
        ),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_the_kernel_cannot_do_it_refuses_with_the_reason(change, reason):
    case = Case(name="", **change)
    x, weight = jax.eval_shape(lambda: cases.arguments(case))
    assert reason in (tpu.unsupported_reason(x.dtype, weight, round_x=case.round_x) or "")
    with pytest.raises(NotImplementedError, match=reason):
        tpu.quant_matmul(jnp.zeros(x.shape, x.dtype), weight, round_x=case.round_x)


@pytest.mark.parametrize(
    "spec",
    [
        P("tensor"),
        pytest.param(P(None, "tensor"), marks=pytest.mark.slow),
        pytest.param(P(), marks=pytest.mark.slow),
    ],
)
def test_several_devices_share_a_product(spec):
    """Over outputs, over inputs, of which rows are rounded as wholes, or not at all. A bias is added once."""
    x, weight = cases.arguments(Case(name="", num_tokens=5, num_in=512, num_out=256, round_x=True))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    chosen = ops.choose(weight, Device(platform="tpu"), mesh=mesh, spec=spec).chosen
    assert chosen.platform == "tpu"
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(256), "bfloat16")
    for dtype, error in ((jnp.float32, 2e-6), (jnp.bfloat16, 2e-6 + 2.0**-8)):
        with pltpu.force_tpu_interpret_mode():
            product = partial(ops.matmul, kernel=chosen, bias=bias, dtype=dtype)
            got = np.asarray(jax.jit(product)(x, weight), np.float32)
        wanted = jax.jit(partial(reference.quant_matmul, round_x=True, bias=bias))(x, weight)
        np.testing.assert_allclose(got, wanted, rtol=error, atol=2e-6 * np.abs(wanted).max())
