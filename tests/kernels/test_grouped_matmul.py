"""The grouped product in XLA, and the TPU kernel, interpreted, against the definition."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tile_sizes
from pallas_kernels.grouped_matmul import cases, gpu, reference, tpu, tune, xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from tests.kernels.grouped_matmul import GroupedMatmulTests, case_of

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


class XLAAndTPU(GroupedMatmulTests):
    fast = ("odd", "padding", "nothing")

    @pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
    def test_a_row_is_the_same_to_the_bit_in_any_company(self, dtype):
        rows = (6, 1), (74, 1), (127, 3), (0, 0)
        self.check_rows_alone(dtype, rows, before=(0, 1, 31, 40))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("number", "size"), [("int4", 128), ("int4", 32), ("int8", 128), ("fp8_e4m3", 128)]
    )
    def test_and_so_with_groups(self, number, size):
        self.check_rows_alone(
            "bfloat16", ((6, 1), (127, 3)), before=(0, 31), format=number, group_size=size
        )

    def test_integers_are_summed_exactly_and_then_scaled(self):
        rng = np.random.default_rng(0)
        x, weights = (rng.integers(-127, 128, n).astype(np.int8) for n in ((70, 256), (4, 40, 256)))
        row_scale, scale = (
            np.exp(rng.standard_normal(n), dtype=np.float32) for n in ((70, 1), (4, 40))
        )
        row_scale[54:] = np.nan
        group_sizes = np.array([33, 0, 20, 1], np.int32)
        quantized = QuantizedWeight(data=weights, scale=scale)
        given = dict(x=x, weights=quantized, group_sizes=group_sizes, row_scale=row_scale)
        out = self.multiply(**given)
        assert out.dtype == np.float32 and not out[54:].any()
        np.testing.assert_array_equal(
            out, reference.grouped_matmul(**jax.tree.map(jnp.asarray, given))
        )
        sums = x[33:53].astype(int) @ weights[2].astype(int).T
        expected = sums.astype(np.float32) * row_scale[33:53] * scale[2]
        np.testing.assert_array_equal(out[33:53], expected)


class TestXLA(XLAAndTPU):
    program = staticmethod(jax.jit(xla.grouped_matmul))

    def rounds_weights(self, case):
        return case.format == "int4"

    def multiply(self, **arguments):
        return np.asarray(self.program(**arguments))


@pytest.mark.slow
class TestTPU(XLAAndTPU):
    """The interpreter fills uninitialised memory with NaN, and finds races."""

    program = staticmethod(jax.jit(partial(tpu.grouped_matmul, interpret=INTERPRETED)))

    def rounds_weights(self, case):
        return (case.group_size or 128) < 128

    def multiply(self, **arguments):
        out = np.asarray(self.program(**arguments))
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["odd", "wide", "edges-of-tiles", "int4", "int4-groups-of-32", "fp8-groups"]
)
def test_sizes_of_the_tpu_kernel_change_no_bit(name):
    arguments = cases.arguments(case_of(name))
    expected = TestTPU().multiply(**arguments)
    for sizes in (
        tpu.TileSizes(least_tile=64, outputs=256),
        tpu.TileSizes(least_tile=256),
        tpu.TileSizes(most_tile=32),
    ):
        multiply = jax.jit(partial(tpu.grouped_matmul, sizes=sizes, interpret=INTERPRETED))
        np.testing.assert_array_equal(multiply(**arguments), expected)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_sizes_are_those_that_were_measured_on_a_kind_of_device(platform, tmp_path):
    sizes = {
        "gpu": gpu.TileSizes(few_stages=6, few_columns=256),
        "tpu": tpu.TileSizes(least_tile=64),
    }
    path = tile_sizes.write("a kind", sizes[platform], {}, tmp_path)
    assert tile_sizes.tuned_sizes("grouped_matmul", platform, "a kind", tmp_path) == sizes[platform]
    assert (
        tile_sizes.tuned_sizes("grouped_matmul", platform, "another", tmp_path)
        == type(sizes[platform])()
    )
    path.write_text(path.read_text().replace("few_", "new_").replace("least_", "new_"))
    with pytest.raises(ValueError, match="a_kind.json: sizes are"):
        tile_sizes.tuned_sizes("grouped_matmul", platform, "a kind", tmp_path)
    for path in tile_sizes.folder_of("grouped_matmul").glob(
        "*.json"
    ):  # what was really measured, if anything
        kind = json.loads(path.read_text())["device_kind"]
        tile_sizes.tuned_sizes("grouped_matmul", "tpu" if "tpu" in path.name else "gpu", kind)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_tuning_takes_the_fastest_of_what_fits(platform, monkeypatch):
    best = {name: x[1] for _, stage in tune.CANDIDATES[platform] for name, x in stage.items()}
    works = []

    def seconds(platform, sizes, work):
        works.append(work)
        return 1.0 + sum(getattr(sizes, name) != value for name, value in best.items())

    monkeypatch.setattr(tune, "_seconds", seconds)
    sizes, _ = tune.tune(platform)
    assert sizes == tile_sizes.kernel_of("grouped_matmul", platform).TileSizes(**best)
    assert {model for model, _ in works} == set(cases.MODELS)


def test_what_is_measured_is_rows_of_all_groups(monkeypatch):
    """With a small model, on the platform that is here."""
    small = replace(cases.MODELS[0], num_groups=4, num_inputs=128, num_outputs=128)
    x, weights, group_sizes = tune._arguments(small, 40)
    assert x.shape == (40, 128) and weights.shape == (4, 128, 128) and group_sizes.sum() == 40
    monkeypatch.setattr(tune, "kernel_of", lambda operation, platform: Plain)
    assert tune._seconds("gpu", None, (small, 40)) > 0


class Plain:
    @staticmethod
    def grouped_matmul(x, weights, group_sizes, *, sizes):
        return xla.grouped_matmul(x, weights, group_sizes)


def test_stages_are_two_or_more():
    with pytest.raises(ValueError, match="a stage is filled while another is read"):
        gpu.TileSizes(few_stages=1)
