"""The Mosaic GPU kernel of Mamba-2 against the definition: interpreted anywhere, and for real with `-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer and fills fresh memory with NaN.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.delta_rule.cases import Case
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.mamba2 import cases, gpu, reference
from tests.kernels.hopper import interpreter
from tests.kernels.one_token import OneTokenTests, check_steps

__test__ = unsupported_jax() is None

DEFINITIONS = cases, reference
ALL_ROWS = next(case for case in cases.CASES if case.name == "all-rows")


def run(interpret=None, **arguments) -> tuple[np.ndarray, np.ndarray]:
    states, out = jax.jit(partial(gpu.one_token, interpret=interpret))(**arguments)
    return np.array(states), np.array(out)


class Hopper(OneTokenTests):
    cases = (
        *cases.CASES,
        Case(name="groups", rows=2, keys=2, values=3, value_dim=64),
        Case(name="wide-values", rows=2, keys=2, values=2, value_dim=192, key_dim=32),
    )
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
        Case(name="nemotron-h", rows=60, most=64, num_slots=65, keys=8, values=16, value_dim=64),
    )

    def apply(self, **arguments):
        return run(**arguments)

    def test_a_row_is_the_same_to_the_bit_in_any_company(self):
        self.check_rows_alone(ALL_ROWS)
        self.check_rows_alone(
            Case(name="", rows=20, most=20, num_slots=30, keys=1, values=48, value_dim=64)
        )


@pytest.mark.parametrize(
    ("shape", "num_values", "reason"),
    [
        ((8, 1, 128, 4096), 64, None),
        ((8, 8, 128, 512), 8, None),
        ((8, 8, 12, 512), 8, "key dim 12 is no multiple of 8 up to 256"),
        ((8, 8, 128, 512), 16, "value dim 32 is no multiple of 64"),
    ],
)
def test_which_states_the_kernel_serves(shape, num_values, reason):
    states = jax.ShapeDtypeStruct(shape, np.float32)
    assert gpu.unsupported_reason(states, num_values) == reason


def test_others_it_refuses_with_the_reason():
    arguments = cases.arguments(Case(name="", rows=1, value_dim=32))
    with pytest.raises(NotImplementedError, match="value dim 32 is no multiple of 64"):
        gpu.one_token(**arguments)
