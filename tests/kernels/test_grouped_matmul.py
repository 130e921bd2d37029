"""The grouped product in XLA, and JAX's TPU kernel as we call it, interpreted, against the definition."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops import experts
from pallas_kernels import tuning
from pallas_kernels.grouped_matmul import cases, gpu, reference, tpu, tune, xla

IMPLEMENTATIONS = {
    "xla": jax.jit(xla.grouped_matmul),
    "tpu": jax.jit(partial(tpu.grouped_matmul, interpret=True)),
}
FAST = ("odd", "padding", "nothing")
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in cases.SMALL
]
BOTH = [pytest.param("xla"), pytest.param("tpu", marks=pytest.mark.slow)]


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_every_case(case, implementation):
    arguments = cases.arguments(case)
    got = IMPLEMENTATIONS[implementation](**arguments)
    assert got.dtype == jnp.float32
    with jax.default_matmul_precision("highest"):
        expected = reference.grouped_matmul(**arguments)
    # Products of bfloat16 are exact in float32; sums of 128 to 1536 of them are not.
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert (np.asarray(got)[sum(case.group_sizes) :] == 0).all()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_row_s_result_is_the_same_to_the_bit_in_any_company(implementation, dtype):
    """Alone with its expert, in other places of a tile, beside other rows, and beside experts of NaN."""
    case = cases.Case(
        name="", group_sizes=(5, 70, 0, 53), num_rows=130, num_inputs=384, dtype=dtype
    )
    arguments = cases.arguments(case)
    multiply = IMPLEMENTATIONS[implementation]
    together = np.asarray(multiply(**arguments))
    for row, group in ((6, 1), (74, 1), (127, 3), (0, 0)):
        for before in (0, 1, 31, 40):  # rows of its own group
            moved = cases.arguments(replace(case, group_sizes=(0,) * 4), seed=row + before)
            x = moved["x"].at[:before].set(1.5).at[before].set(arguments["x"][row])
            sizes = jnp.zeros(4, jnp.int32).at[group].set(before + 1)
            is_own = (jnp.arange(4) == group)[:, None, None]
            weights = jnp.where(is_own, arguments["weights"], jnp.nan)
            alone = np.asarray(multiply(x=x, weights=weights, group_sizes=sizes))
            np.testing.assert_array_equal(alone[before], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "wide", "edges-of-tiles"])
def test_sizes_of_the_tpu_kernel_change_no_bit(name):
    arguments = cases.arguments(next(case for case in cases.SMALL if case.name == name))
    expected = IMPLEMENTATIONS["tpu"](**arguments)
    for sizes in (
        tpu.TileSizes(few_tile=64, outputs=256),
        tpu.TileSizes(few_rows=8, many_tile=256),
    ):
        multiply = jax.jit(partial(tpu.grouped_matmul, sizes=sizes, interpret=True))
        np.testing.assert_array_equal(multiply(**arguments), expected)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_sizes_are_those_that_were_measured_on_a_kind_of_device(platform, tmp_path, monkeypatch):
    """And an engine has them."""
    sizes = {"gpu": gpu.TileSizes(few_stages=6, few_columns=256), "tpu": tpu.TileSizes(few_tile=64)}
    path = tuning.write("a kind", sizes[platform], {}, tmp_path)
    assert tune.tuned_sizes(platform, "a kind", tmp_path) == sizes[platform]
    assert tune.tuned_sizes(platform, "another", tmp_path) == type(sizes[platform])()
    monkeypatch.setattr(experts, "tuned_sizes", partial(tune.tuned_sizes, folder=tmp_path))
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 128), (2, 256, 128)))
    options = dict(device_kind="a kind", compute_capability="9.0" if platform == "gpu" else None)
    product, reason = experts.choose(platform, x, weights, **options)
    if reason is None:
        assert isinstance(product, partial) and product.keywords == {"sizes": sizes[platform]}
    else:
        assert product is xla.grouped_matmul and "the kernels need jax" in reason
    path.write_text(path.read_text().replace("few_", "new_"))
    with pytest.raises(ValueError, match="a_kind.json: sizes are"):
        tune.tuned_sizes(platform, "a kind", tmp_path)
    for path in tune.FOLDER.glob("*.json"):  # what was really measured, if anything
        kind = json.loads(path.read_text())["device_kind"]
        tune.tuned_sizes("tpu" if "tpu" in path.name else "gpu", kind)


def test_other_gpus_than_hopper_s_have_xla_and_a_reason():
    x, weights = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((2, 256, 128), jnp.bfloat16)
    for capability, said in (("10.0", "this device's is 10.0"), (None, "is unknown")):
        product, reason = experts.choose("gpu", x, weights, compute_capability=capability)
        assert product is xla.grouped_matmul and said in (reason or "")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_tuning_takes_the_fastest_of_what_fits(platform, monkeypatch):
    best = {name: x[1] for _, stage in tune.CANDIDATES[platform] for name, x in stage.items()}
    works = []

    def seconds(platform, sizes, work):
        works.append(work)
        return 1.0 + sum(getattr(sizes, name) != value for name, value in best.items())

    monkeypatch.setattr(tune, "_seconds", seconds)
    sizes, _ = tune.tune(platform)
    assert sizes == tune.kernel_of(platform).TileSizes(**best)
    assert {model for model, _ in works} == set(cases.MODELS)


def test_what_is_measured_is_rows_of_all_groups(monkeypatch):
    """With a small model, on the platform that is here."""
    small = replace(cases.MODELS[0], num_groups=4, num_inputs=128, num_outputs=128)
    x, weights, group_sizes = tune._arguments(small, 40)
    assert x.shape == (40, 128) and weights.shape == (4, 128, 128) and group_sizes.sum() == 40
    monkeypatch.setattr(tune, "kernel_of", lambda platform: Plain)
    assert tune._seconds("gpu", None, (small, 40)) > 0


class Plain:
    @staticmethod
    def grouped_matmul(x, weights, group_sizes, *, sizes):
        return xla.grouped_matmul(x, weights, group_sizes)


def test_stages_are_two_or_more():
    with pytest.raises(ValueError, match="a stage is filled while another is read"):
        gpu.TileSizes(few_stages=1)
