"""The Mosaic GPU kernel of the gated delta rule against the definition: interpreted anywhere, and for real with
`-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer and fills fresh memory with NaN.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.delta_rule import cases, gpu, reference
from pallas_kernels.delta_rule.cases import Case
from pallas_kernels.hopper import unsupported_jax
from tests.kernels.hopper import interpreter
from tests.kernels.one_token import OneTokenTests, check_steps

__test__ = unsupported_jax() is None

DEFINITIONS = cases, reference
ALL_ROWS = next(case for case in cases.CASES if case.name == "all-rows")
OTHERS = (
    Case(name="wide-keys", rows=2, keys=1, values=2, key_dim=256, value_dim=64),
    Case(name="fewest-keys", rows=3, keys=1, values=1, key_dim=8, value_dim=64),
)


def run(interpret=None, **arguments) -> tuple[np.ndarray, np.ndarray]:
    states, out = jax.jit(partial(gpu.one_token, interpret=interpret))(**arguments)
    return np.array(states), np.array(out)


class Hopper(OneTokenTests):
    cases = (*cases.CASES, *OTHERS)
    definitions = DEFINITIONS


@pytest.mark.slow
class TestInterpreted(Hopper):
    def apply(self, **arguments):
        return run(interpreter(), **arguments)

    def test_a_row_is_the_same_to_the_bit_in_any_company(self):
        self.check_rows_alone(ALL_ROWS)

    def test_no_two_programs_touch_the_same_memory(self, capsys):
        run(interpreter(detect_races=True), **self.arguments(ALL_ROWS))
        assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_kernel_takes_the_rows_of_one_token_of_a_step(monkeypatch):
    kernel, calls = gpu.one_token, []

    def interpreted(*given):
        calls.append(given)
        return kernel(*given, interpret=interpreter())

    monkeypatch.setattr(gpu, "one_token", interpreted)
    arguments = cases.arguments(ALL_ROWS)
    check_steps(arguments["states"], arguments["rows"].tokens)
    assert len(calls) == 2


@pytest.mark.gpu
class TestOnARealGPU(Hopper):
    cases = (
        *Hopper.cases,
        Case(name="qwen3.5-35b", rows=60, most=64, num_slots=65, keys=16, values=2),
    )

    def apply(self, **arguments):
        return run(**arguments)

    def test_a_row_is_the_same_to_the_bit_in_any_company(self):
        self.check_rows_alone(ALL_ROWS)
        self.check_rows_alone(
            Case(name="", rows=20, most=20, num_slots=30, keys=16, values=2, value_dim=128)
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((8, 16, 2, 128, 128), "float32", None),
        ((8, 2, 3, 256, 64), "float32", None),
        ((8, 16, 2, 128, 128), "bfloat16", "states are bfloat16; the kernel reads float32"),
        ((8, 16, 2, 12, 128), "float32", "key dim 12 is no multiple of 8 up to 256"),
        ((8, 16, 2, 264, 128), "float32", "key dim 264 is no multiple of 8 up to 256"),
        ((8, 16, 2, 128, 96), "float32", "value dim 96 is no multiple of 64"),
    ],
)
def test_which_states_the_kernel_serves(shape, dtype, reason):
    states = jax.ShapeDtypeStruct(shape, dtype)
    assert gpu.unsupported_reason(states) == reason


def test_others_it_refuses_with_the_reason():
    arguments = cases.arguments(Case(name="", rows=1, value_dim=32))
    with pytest.raises(NotImplementedError, match="value dim 32 is no multiple of 64"):
        gpu.one_token(**arguments)
