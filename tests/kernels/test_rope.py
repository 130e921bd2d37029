"""Rotary embeddings: the product that XLA has on a TPU, to the bit; and the kernel, interpreted, but for rounding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from jaxpage.ops.rope import Rotate
from pallas_kernels.rope import cases, reference, tpu, xla
from pallas_kernels.rope.cases import CASES, Case

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
FAST = ("half-a-head", "neighbours", "a-head-in-two-registers", "float32")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_product_rotates_to_the_bit(case):
    joined, cos, sin = cases.arguments(case).values()
    parts = reference.split(joined, case.heads)
    by_product = xla.by_product(parts, cos, sin, interleaved=case.interleaved)
    in_pairs = reference.rotate(parts, cos, sin, interleaved=case.interleaved)
    for found, want in zip(by_product, in_pairs, strict=True):
        np.testing.assert_array_equal(found, want)


def exact(case: Case) -> list[jax.Array]:
    """In float32, rounded once."""
    joined, cos, sin = (x.astype(jnp.float32) for x in cases.arguments(case).values())
    options = {"heads": case.heads, "interleaved": case.interleaved}
    rotate = jax.jit(partial(reference.split_and_rotate, **options))
    return [x.astype(case.dtype) for x in rotate(joined, cos, sin)]


def check(found: list[jax.Array], want: list[jax.Array]) -> None:
    """Sums of two products may be fused, which rounds once less."""
    epsilon = jnp.finfo(want[0].dtype).eps
    for one, other in zip(found, want, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=epsilon, atol=1e-6)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.slow
@each_case
def test_the_kernel_splits_and_rotates(case):
    options = {"interleaved": case.interleaved, "interpret": INTERPRETED}
    run = jax.jit(partial(tpu.split_and_rotate, heads=case.heads, **options))
    check(run(**cases.arguments(case)), exact(case))


@pytest.mark.slow
def test_the_kernel_rotates_arrays_of_their_own():
    case = Case(name="", num_tokens=20)
    joined, cos, sin = cases.arguments(case).values()
    parts = reference.split(joined, case.heads)[:2]
    check(jax.jit(partial(tpu.rotate, interpret=INTERPRETED))(parts, cos, sin), exact(case)[:2])


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "reason"),
    [
        ((4, 2, 2), 64, jnp.bfloat16, None),
        ((14, 1), 64, jnp.bfloat16, "1 heads of 64"),
        ((4096, 512), 128, jnp.bfloat16, "MB of VMEM"),
        ((4, 2, 2), 64, jnp.float16, "heads are float16"),
    ],
)
def test_what_the_kernel_cannot_serve(heads, head_dim, dtype, reason):
    found = tpu.unsupported_reason(heads, head_dim, jnp.dtype(dtype))
    assert found is None if reason is None else reason in (found or "")


def test_an_unsupported_call_says_why():
    joined, cos, sin = cases.arguments(
        Case(name="", head_dim=64, half=32, heads=(3, 1, 1))
    ).values()
    with pytest.raises(NotImplementedError, match="3 heads of 64"):
        tpu.split_and_rotate(joined, cos, sin, heads=(3, 1, 1))


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("head_dim", [128, 64])
def test_where_there_is_no_tpu_xla_rotates(in_step, head_dim):
    """Whether or not the kernel could: the same program as the reference's, so the same bits."""
    case = Case(name="", head_dim=head_dim, half=32, heads=(4, 1, 1))
    joined, cos, sin = cases.arguments(case).values()
    rotate = Rotate(in_step=in_step)
    want = jax.jit(partial(reference.split_and_rotate, heads=case.heads))(joined, cos=cos, sin=sin)
    for found in (
        jax.jit(partial(rotate.split, heads=case.heads))(joined, cos=cos, sin=sin),
        [*jax.jit(rotate)(reference.split(joined, case.heads)[:2], cos, sin), want[2]],
    ):
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(one, other)
