"""The Mosaic GPU kernel of low-rank adapters against the definition: interpreted anywhere, and for real with `-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer and fills fresh memory with NaN. Weights of slots that no token has
are NaN too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops import lora as ops
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.lora import cases, gpu
from pallas_kernels.lora.cases import Case
from tests.kernels.hopper import interpreter, look_for_races_of_wgmma, sum_in_float64
from tests.kernels.lora import LoraTests, case_of

__test__ = unsupported_jax() is None

OTHERS = (
    Case(name="float16", dtype="float16"),
    Case(name="three-tiles-of-tokens", num_tokens=131, num_outs=(128, 64)),
    # A program that shrinks has 256 and 512 inputs.
    Case(name="deep", num_in=3072, num_outs=(64, 64)),
    Case(name="deepest", num_in=6144, num_outs=(64,), num_slots=3, slots=(1, 0, 3)),
)


@cache
def program(interpret=None):
    return jax.jit(partial(gpu.lora, interpret=interpret), static_argnames="num_slots")


def is_served(case: Case) -> bool:
    arguments = jax.eval_shape(partial(cases.arguments, case))
    halves = arguments["a"], arguments["b"]
    return gpu.unsupported_reason(*halves, num_slots=case.num_slots) is None


class Hopper(LoraTests):
    cases = (*filter(is_served, cases.SMALL), *OTHERS)

    def check_rows_alone(self, name: str) -> None:
        """Alone, in another place among others, and whatever adapters these have."""
        arguments = cases.arguments(replace(case_of(name), num_tokens=80), poison=False)
        out = self.apply(**arguments)
        for rows in (slice(3, 4), slice(61, 72)):
            alone = arguments | {each: arguments[each][rows] for each in ("y", "x", "slots")}
            np.testing.assert_array_equal(self.apply(**alone), out[rows])
        slots = arguments["slots"]
        own = jnp.isin(slots, jnp.arange(0, arguments["num_slots"] + 1, 2))
        changed = jnp.where(own, slots, slots % 2 + 1)
        np.testing.assert_array_equal(self.apply(**arguments | {"slots": changed})[own], out[own])


@pytest.mark.slow
class TestInterpreted(Hopper):
    def apply(self, **arguments):
        return np.asarray(program(interpreter())(**arguments))

    @pytest.mark.parametrize("name", ["joined", "rank-256"])
    def test_a_row_is_the_same_to_the_bit_in_any_company(self, name, monkeypatch):
        sum_in_float64(monkeypatch)
        self.check_rows_alone(name)

    @pytest.mark.parametrize("name", ["joined", "ragged"])
    def test_no_two_copies_touch_the_same_memory_unordered(self, name, monkeypatch, capsys):
        """More slots than tiles in flight."""
        look_for_races_of_wgmma(monkeypatch)
        case, run = case_of(name), program(interpreter(detect_races=True))
        assert len(case.slots) > gpu.STAGES
        run(**cases.arguments(case))
        assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
def test_few_tokens_of_a_step_are_the_kernel_s(monkeypatch):
    """XLA's version multiplies with all slots, also with those of NaN."""
    monkeypatch.setattr(gpu, "lora", partial(gpu.lora, interpret=interpreter()))
    for num_tokens in (ops.MOST_TOKENS, ops.MOST_TOKENS + 1):
        case = replace(case_of("unused-slots"), num_tokens=num_tokens, num_outs=(128,))
        out = ops.lora(**cases.arguments(case), kernel=ops.LoraKernel("gpu"))
        assert np.isnan(out).any() == (num_tokens > ops.MOST_TOKENS)


@pytest.mark.gpu
class TestOnARealGPU(Hopper):
    cases = (
        *Hopper.cases,
        Case(name="of-7b", num_tokens=128, num_in=18944, num_outs=(3584,), rank=64),
    )

    def apply(self, **arguments):
        return np.asarray(program()(**arguments))

    @pytest.mark.parametrize("name", ["mixed", "joined", "rank-256"])
    def test_a_row_is_the_same_to_the_bit_in_any_company(self, name):
        self.check_rows_alone(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "adapters are float32; the kernel reads bfloat16 and float16"),
        (dict(rank=24), "rank 24 is no multiple of 16 up to 256"),
        (dict(rank=272), "rank 272 is no multiple of 16 up to 256"),
        (dict(num_in=96), "96 inputs are no multiple of 64"),
        (dict(num_outs=(64, 32)), "32 outputs are no multiple of 64"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_it_refuses_with_the_reason(change, reason):
    case = Case(name="", **dict(num_slots=2, slots=(1,), num_outs=(64,)) | change)
    with pytest.raises(NotImplementedError, match=reason):
        gpu.lora(**cases.arguments(case))
