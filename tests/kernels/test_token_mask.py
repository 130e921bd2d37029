"""Masks and biases of logits: XLA's version and the TPU kernel, interpreted, against the definition, bit for bit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.token_mask import cases, reference, tpu, xla
from pallas_kernels.token_mask.cases import CASES, Case

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
kernel = jax.jit(partial(tpu.mask_and_add, interpret=INTERPRETED))
definition = jax.jit(reference.mask_and_add)


def logits_of(case: Case) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(partial(cases.arguments, case))["logits"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla(case):
    arguments = cases.arguments(case)
    want = definition(**arguments)
    np.testing.assert_array_equal(jax.jit(xla.mask_and_add)(**arguments), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if tpu.unsupported_reason(logits_of(case)) is None],
    ids=lambda case: case.name,
)
def test_tpu(case):
    arguments = cases.arguments(case)
    want = definition(**arguments)
    np.testing.assert_array_equal(kernel(**arguments), want)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 45), "45 tokens"),
        ((1, 256), "single row"),
        ((12, 256), "not 12"),
        ((8, 1 << 20), "of VMEM"),
    ],
)
def test_what_the_kernel_cannot_serve(shape, reason):
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert reason in (tpu.unsupported_reason(logits) or "")


def test_an_unsupported_call_says_why():
    given = cases.arguments(Case(name="ragged", vocab_size=45))
    with pytest.raises(NotImplementedError, match="45 tokens"):
        tpu.mask_and_add(given["logits"], given["mask"], given["ids"], given["values"])
