"""What all `tune.py` share, by the products with quantised weights; and that these are right with any sizes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpage.device import Device
from jaxpage.ops import matmul as ops
from pallas_kernels import hopper, tile_sizes, tuning
from pallas_kernels.quant_matmul import cases, gpu, quantized, tpu, tune


@pytest.mark.parametrize(
    ("platform", "kind", "file", "sizes"),
    [
        (
            "gpu",
            "NVIDIA H200",
            "nvidia_h200.json",
            gpu.TileSizes(smem_kib=72, most_stages=4, enough_programs=50),
        ),
        ("tpu", "TPU v6 lite", "tpu_v6_lite.json", tpu.TileSizes(tile_out=256, least_tiles=4)),
    ],
)
def test_sizes_are_those_that_were_measured_on_a_kind_of_device(
    platform, kind, file, sizes, tmp_path
):
    assert tile_sizes.tuned_sizes("quant_matmul", platform, kind, tmp_path) == type(sizes)()
    path = tile_sizes.write(kind, sizes, {"a=1": 1e-3}, tmp_path / "tuned")
    assert path.name == file
    assert tile_sizes.tuned_sizes("quant_matmul", platform, kind, path.parent) == sizes
    assert (
        tile_sizes.tuned_sizes("quant_matmul", platform, f"{kind} PCIe", path.parent)
        == type(sizes)()
    )
    said = json.loads(path.read_text())
    assert (said["device_kind"], said["jax"], said["seconds"]) == (
        kind,
        jax.__version__,
        {"a=1": 1e-3},
    )
    for broken in (
        {"tile": 1},
        said["sizes"] | {next(iter(said["sizes"])): 0},
        said["sizes"] | {"a": 1},
    ):
        path.write_text(json.dumps(said | {"sizes": broken}))
        with pytest.raises(ValueError, match=f"{file}: sizes are"):
            tile_sizes.tuned_sizes("quant_matmul", platform, kind, path.parent)


def test_what_was_really_measured_if_anything_can_be_read():
    folder = tile_sizes.folder_of("quant_matmul")
    for path in folder.glob("*.json"):
        kind = json.loads(path.read_text())["device_kind"]
        assert path == tile_sizes.path_of(kind, folder)
        tile_sizes.tuned_sizes("quant_matmul", "tpu" if "tpu" in path.name else "gpu", kind)


def test_an_engine_has_what_was_measured_on_its_device(monkeypatch, tmp_path):
    sizes = tpu.TileSizes(tile_tokens=128)
    tile_sizes.write("TPU v5 lite", sizes, {}, tmp_path)
    monkeypatch.setattr(ops, "tuned_sizes", partial(tile_sizes.tuned_sizes, folder=tmp_path))
    weight = jax.eval_shape(lambda: cases.arguments(cases.SMALL[0])[1])
    for kind, wanted in (("TPU v5 lite", sizes), ("TPU7x", tpu.TileSizes())):
        choice = ops.choose(weight, Device(platform="tpu", kind=kind))
        assert choice.chosen == ops.MatmulKernel("tpu", wanted)


class Clock:
    """Moves only when somebody works, and `perf_counter` tells it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(tuning.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> np.ndarray:
        self.now += seconds
        return np.zeros(1)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_tuning_takes_the_fastest_of_what_fits(platform, monkeypatch):
    """By the clock of a device for which the second value of everything is best, and the third does not fit."""
    clock, kernel = Clock(monkeypatch), tile_sizes.kernel_of("quant_matmul", platform)
    best = {
        name: values[1] for _, stage in tune.CANDIDATES[platform] for name, values in stage.items()
    }
    most = {
        name: values[2] for _, stage in tune.CANDIDATES[platform] for name, values in stage.items()
    }

    def product(x, weight, *, round_x, dtype, sizes):
        if any(getattr(sizes, name) == value for name, value in most.items()):
            raise ValueError("too much shared memory")
        wrong = sum(getattr(sizes, name) != value for name, value in best.items())
        return clock.work(1e-3 * x * (1 + wrong))

    monkeypatch.setattr(kernel, "quant_matmul", product)
    monkeypatch.setattr(tune.jax, "jit", lambda function: function)
    monkeypatch.setattr(tune, "_arguments", lambda case: (case.num_tokens, [None, None]))
    sizes, seconds = tune.tune(platform)
    assert sizes == kernel.TileSizes(**best)
    assert not any(
        f"{name}={value}" in key.split() for key in seconds for name, value in most.items()
    )


@pytest.mark.parametrize("faster, stays", [(1.0, True), (0.98, True), (0.96, False)])
def test_of_about_equally_fast_sizes_the_defaults_stay(faster, stays):
    default = tpu.TileSizes()
    values = {"tile_out": (default.tile_out // 2, default.tile_out, 2 * default.tile_out)}

    def seconds(sizes, work):
        return faster if sizes.tile_out > default.tile_out else 1.0

    sizes, _ = tuning.fastest(default, [((None,), values)], seconds)
    assert (sizes == default) == stays


def test_short_works_count_as_much_as_long_ones(capsys):
    times = {256: (1.0, 100.0), 512: (2.0, 90.0)}
    best, seconds = tuning.fastest(
        tpu.TileSizes(),
        [((0, 1), {"tile_out": (256, 512)})],
        lambda sizes, work: times[sizes.tile_out][work],
    )
    assert best.tile_out == 256 and seconds["tile_out=256"] == pytest.approx(10.0)
    assert "tile_out=512: 13416.408 ms" in capsys.readouterr().err


def test_where_nothing_runs_there_is_nothing_to_choose(capsys):
    def seconds(sizes, work):
        raise NotImplementedError("no such device\nat all")

    with pytest.raises(
        RuntimeError, match=r"no candidate of \{'least_tiles': \(1, 2\)\} could be run"
    ):
        tuning.fastest(tpu.TileSizes(), [((0,), {"least_tiles": (1, 2)})], seconds)
    assert (
        capsys.readouterr().err == "least_tiles=1: no such device\nleast_tiles=2: no such device\n"
    )


@pytest.mark.parametrize(
    ("seconds", "launches"), [(1e-3, 5), (1.0, 1), (1e-6, tuning.MOST_LAUNCHES)]
)
def test_a_sample_is_as_many_launches_as_hide_the_dispatch(seconds, launches, monkeypatch):
    """The first one, which compiles, takes long and is not counted."""
    clock, calls = Clock(monkeypatch), []

    def launch():
        calls.append(None)
        return clock.work(seconds if len(calls) > 1 else 60.0)

    assert tuning.seconds_of(launch) == pytest.approx(seconds)
    assert len(calls) == 2 + launches * tuning.SAMPLES


@pytest.mark.parametrize(
    ("platform", "capability", "reason"),
    [
        ("cpu", None, r"nothing to tune on fake \(cpu\): the kernels are for Hopper GPUs and TPUs"),
        ("gpu", "8.0", r"nothing to tune on fake \(gpu\): .* this device's is 8\.0"),
        ("gpu", "9.0", r"nothing to tune on fake \(gpu\): ptxas 13\.0\.88 "),
    ],
)
def test_tuning_refuses_a_machine_without_such_a_device(platform, capability, reason, monkeypatch):
    fake = SimpleNamespace(device_kind="fake", platform=platform, compute_capability=capability)
    monkeypatch.setattr(tuning.jax, "devices", lambda: [fake])
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 0, 88))
    monkeypatch.setattr(hopper, "find_ptxas", lambda: Path("ptxas"))
    with pytest.raises(SystemExit, match=reason):
        tuning.tune_here(tune.tune, tile_sizes.folder_of("quant_matmul"))


@pytest.mark.parametrize(
    ("format", "group_size"), [("int8", None), ("int4", 128), ("fp8_e4m3", 128)]
)
def test_weights_to_measure_with_are_as_weights_are(format, group_size):
    case = cases.Case(name="", format=format, num_in=896, group_size=group_size)
    made = jax.eval_shape(partial(tune.random_weight, case), 0)
    wanted = jax.eval_shape(
        lambda: quantized.quantize(jax.numpy.ones((256, 896)), format, case.group_size)
    )
    assert made == wanted
