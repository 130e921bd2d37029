"""The TPU kernel of low-rank adapters, interpreted on the CPU, against the definition.

The interpreter simulates the pipeline's DMAs, fills uninitialised memory with NaN, and finds races. Weights of slots
that no token has are NaN too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from jaxpage.device import Device
from jaxpage.models.layers import Linear, Normal
from jaxpage.models.lora import Adapters
from jaxpage.ops import lora as ops
from pallas_kernels.lora import cases, reference, tpu
from pallas_kernels.lora.cases import Case
from tests.kernels.lora import LoraTests, case_of

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TILES = tpu.TileSizes(tile_tokens=32, tile_out=256)  # several of each


definition = jax.jit(reference.lora, static_argnames="num_slots")


@cache
def program(sizes: tpu.TileSizes):
    kernel = partial(tpu.lora, sizes=sizes, interpret=INTERPRETED)
    return jax.jit(kernel, static_argnames="num_slots")


def run(sizes: tpu.TileSizes = tpu.DEFAULT, **arguments) -> np.ndarray:
    """The kernel's result; no race was seen."""
    out = np.asarray(program(sizes)(**arguments))
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    return out


class TestTPU(LoraTests):
    def apply(self, **arguments):
        return run(**arguments)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mixed", "rank-256", "no-adapter", "joined-float32"])
    def test_several_tiles_and_parts_of_tiles(self, name):
        """Of tokens and of outputs; tiles of tokens use different numbers of slots, and some of them none."""
        case = replace(case_of(name), num_tokens=77)
        self.check(case, sizes=TILES)
        arguments = cases.arguments(replace(case, slots=case.slots[:2]))
        slots = np.where(np.arange(77) < 33, arguments["slots"], 0)
        want = definition(**arguments | {"slots": slots})
        out = run(TILES, **arguments | {"slots": slots})
        np.testing.assert_allclose(out, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "joined-float32", "rank-256"])
def test_a_row_is_the_same_to_the_bit_in_any_company(name):
    """Alone, among others, and whatever adapters these have. As many tokens as above, so that programs are shared.

    Alone and among others in tiles of 16 tokens: with jax 0.12, XLA's products on the CPU depend on the number of rows.
    """
    arguments = cases.arguments(replace(case_of(name), num_tokens=77), poison=False)
    arguments |= {each: np.asarray(arguments[each]) for each in ("y", "x", "slots")}
    small = replace(TILES, tile_tokens=16)
    among_others = run(small, **arguments)
    for rows in (slice(0, 1), slice(3, 11)):
        alone = arguments | {each: arguments[each][rows] for each in ("y", "x", "slots")}
        np.testing.assert_array_equal(run(small, **alone), among_others[rows])
    out = run(**arguments)
    slots = arguments["slots"]
    own = slots % 2 == 0
    changed = np.where(own, slots, slots % 2 + 1)
    np.testing.assert_array_equal(run(**arguments | {"slots": changed})[own], out[own])
    np.testing.assert_array_equal(run(TILES, **arguments), out)


def test_of_many_tokens_tiles_are_alike_and_fit():
    """(tokens, inputs, tokens of a tile)"""
    for num_tokens, num_in, tile in (
        (8, 3584, 16),
        (64, 3584, 64),
        (768, 3584, 384),
        (2048, 3584, 512),
        (2048, 18944, 256),
    ):
        a = jax.ShapeDtypeStruct((512, num_in), jnp.bfloat16)
        b = [jax.ShapeDtypeStruct((3584, 512), jnp.bfloat16)]
        shapes = tpu._fitting(num_tokens, a, b, 8, tpu.DEFAULT)
        assert (shapes.tile_tokens, shapes.tile_out) == (tile, 1792)
        assert shapes.tiles_bytes <= tpu.TILES_BYTES


def test_what_the_kernel_cannot_do_it_refuses_with_the_reason():
    arguments = cases.arguments(Case(name="", rank=24))
    with pytest.raises(NotImplementedError, match="rank 24 is none of"):
        tpu.lora(**arguments)


@pytest.mark.slow
def test_a_layer_has_its_adapters_from_the_kernel_that_was_chosen():
    """Of a joined layer, with a bias."""
    case = case_of("joined")
    arguments = cases.arguments(case, poison=False)
    parts = dict(zip(("q_proj", "k_proj", "v_proj"), case.num_outs, strict=True))
    shape, options = (sum(case.num_outs), case.num_in), dict(dtype=jnp.bfloat16)
    layer = Linear(shape, axes=("heads", "embed"), bias=True, init=Normal(0.1), **options)
    layer.weight.set_value(jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))
    layer.bias.set_value(jax.random.normal(jax.random.key(1), shape[:1], jnp.bfloat16))
    adapters = Adapters(layer, parts, num_slots=case.num_slots, rank=case.rank, **options)
    for variable, value in zip(
        (adapters.a, *adapters.b), (arguments["a"], *arguments["b"]), strict=True
    ):
        variable.set_value(value)
    adapters.slots = nnx.data(arguments["slots"])
    layer.adapters = nnx.data(adapters)
    wanted = np.asarray(layer(arguments["x"]), np.float32)
    halves = adapters.a.get_value(), [b.get_value() for b in adapters.b]
    adapters.kernel = ops.choose(*halves, Device(platform="tpu"), num_slots=8).chosen
    assert adapters.kernel.platform == "tpu"
    with pltpu.force_tpu_interpret_mode():
        got = np.asarray(layer(arguments["x"]), np.float32)
    np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=2**-7)
    assert np.abs(got - np.asarray(layer.product(arguments["x"]))).max() > 1  # there are adapters
