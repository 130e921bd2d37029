"""Low-rank adapters: the definition and XLA against NumPy, and who serves where."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpage.device import Device
from jaxpage.ops import lora as ops
from pallas_kernels import hopper
from pallas_kernels.lora import cases, reference, xla
from pallas_kernels.lora.cases import Case
from tests.kernels.lora import LoraTests

TPU, CPU = Device(platform="tpu", kind="TPU v6 lite"), Device(platform="cpu")
HOPPER = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")


class TestReference(LoraTests):
    program = staticmethod(jax.jit(reference.lora, static_argnames="num_slots"))

    def apply(self, **arguments):
        return np.asarray(self.program(**arguments))


class TestXLA(LoraTests):
    """All slots are multiplied with all tokens."""

    poison = False
    program = staticmethod(jax.jit(xla.lora, static_argnames="num_slots"))

    def apply(self, **arguments):
        return np.asarray(self.program(**arguments))


@pytest.mark.parametrize(
    ("change", "num_devices", "reason"),
    [
        ({}, 1, None),
        (dict(rank=128, num_slots=2), 1, None),
        ({}, 2, "for one device; these are 2"),
        (dict(rank=24, num_slots=16), 1, "rank 24 is none of"),
        (dict(rank=8, num_slots=32), 1, "rank 8 is none of"),
        (dict(rank=64, num_slots=3), 1, "3 slots of rank 64 are no multiple of 128"),
        (dict(num_in=192), 1, "192 inputs are no multiple of 128"),
        (dict(num_outs=(256, 64)), 1, "64 outputs are no multiple of 128"),
        (dict(dtype="float16"), 1, "adapters are float16"),
        (dict(num_in=2**17), 1, "8 slots of rank 32 with 131072 inputs do not fit into VMEM"),
    ],
    ids=str,
)
def test_the_kernel_serves_on_a_tpu_where_it_can_and_says_why_not_elsewhere(
    change, num_devices, reason
):
    a, b, num_slots = shapes(replace(Case(name=""), **change))
    choose = partial(ops.choose, a, b, num_slots=num_slots, num_devices=num_devices)
    choice = choose(TPU)
    assert (choice.chosen.platform == "tpu") == (reason is None)
    assert reason is None or reason in (choice.reason or "")
    assert choose(CPU).chosen == ops.XLA and choose(CPU).reason is None


@pytest.mark.parametrize(
    ("change", "num_devices", "capability", "reason"),
    [
        ({}, 1, "9.0", None),
        ({}, 1, "8.0", r"of compute capability 9\.0; this device's is 8\.0"),
        ({}, 2, "9.0", "for one device; these are 2"),
        (dict(rank=24, num_slots=16), 1, "9.0", "rank 24 is no multiple of 16"),
        (dict(dtype="float32"), 1, "9.0", "adapters are float32"),
    ],
    ids=str,
)
def test_the_kernel_serves_on_a_hopper_gpu_where_it_can_and_says_why_not_elsewhere(
    change, num_devices, capability, reason, monkeypatch
):
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 1, 80))
    a, b, num_slots = shapes(replace(Case(name=""), **change))
    device = replace(HOPPER, compute_capability=capability)
    choice = ops.choose(a, b, device, num_slots=num_slots, num_devices=num_devices)
    if reason is None:
        assert choice.chosen == ops.LoraKernel("gpu") and choice.reason is None
    else:
        assert choice.chosen == ops.XLA and re.search(reason, choice.reason or "")


def test_an_assembler_that_miscompiles_is_a_reason(monkeypatch):
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    monkeypatch.setattr(hopper, "find_ptxas", lambda: Path("/cuda/bin/ptxas"))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 0, 88))
    a, b, num_slots = shapes(Case(name=""))
    choice = ops.choose(a, b, HOPPER, num_slots=num_slots)
    assert choice.chosen == ops.XLA and "ptxas 13.0.88" in (choice.reason or "")


@pytest.mark.parametrize("device", [TPU, HOPPER], ids=["tpu", "hopper"])
@pytest.mark.parametrize(("num_slots", "rank"), [(1, 16), (8, 16), (1, 128), (5, 8)])
def test_few_columns_are_xlas_without_a_reason(num_slots, rank, device):
    a, b, num_slots = shapes(Case(name="", num_slots=num_slots, rank=rank))
    choice = ops.choose(a, b, device, num_slots=num_slots)
    assert choice.chosen == ops.XLA and choice.reason is None


@pytest.mark.parametrize(("num_tokens", "num_kernels"), [(ops.MOST_TOKENS, 1), (200, 0)])
def test_many_tokens_are_xlas(num_tokens, num_kernels):
    arguments = cases.arguments(Case(name="", num_tokens=num_tokens))
    kernel = ops.LoraKernel("tpu")
    program = jax.jit(ops.lora, static_argnames=("num_slots", "kernel"))
    traced = program.trace(**arguments, kernel=kernel)
    assert str(traced.jaxpr).count("pallas_call[") == num_kernels


def shapes(case: Case):
    a, *b = (
        jax.ShapeDtypeStruct(shape, case.dtype)
        for shape in (
            (case.num_slots * len(case.num_outs) * case.rank, case.num_in),
            *((num_out, case.num_slots * case.rank) for num_out in case.num_outs),
        )
    )
    return a, b, case.num_slots


def test_xla_takes_tokens_in_any_number_of_axes():
    arguments = cases.arguments(Case(name="", num_tokens=12), poison=False)
    want = TestXLA().apply(**arguments)
    for name in ("y", "x", "slots"):
        arguments[name] = arguments[name].reshape(3, 4, *arguments[name].shape[1:])
    np.testing.assert_array_equal(TestXLA().apply(**arguments).reshape(want.shape), want)
