"""Pictures on their way to the device: padded sizes, the encoder's call, what goes up with the tokens of a step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.models.inputs import ForwardInput
from jaxpage.plan import StepPlan
from jaxpage.runner.buckets import Bucket, StepPrograms, fitting_buckets
from jaxpage.runner.encoder import (
    abstract_inputs,
    encode_into,
    make_picture_spec,
    pack_encode,
    picture_fields,
    with_pictures,
)
from jaxpage.runner.layouts import step_layout
from jaxpage.runner.pack import pack
from tests.fake_vision import FakeProcessor, FakeVision, pixels


def make_spec(*, has_positions: bool = True, cache_bytes: int | None = None, length: int = 300):
    return make_picture_spec(
        FakeVision(4),
        row_bytes=32,
        cache_bytes=cache_bytes,
        max_model_len=length,
        max_num_batched_tokens=64,
        has_positions=has_positions,
    )


def test_sizes_are_powers_of_two_up_to_the_longest_prompt():
    assert make_spec(length=300).sizes == (256, 512, 1024, 2048)
    assert make_spec(length=40).sizes == (256,)
    assert make_spec(length=10**6).sizes[-1] == 65536
    assert make_spec().size_for(257) == 512
    with pytest.raises(ValueError, match="2049 patches, the largest encoder takes 2048"):
        make_spec().size_for(2049)


def test_sizes_end_with_the_largest_picture_that_the_model_knows():
    def sizes(**options) -> tuple[int, ...]:
        vision = dataclasses.replace(FakeVision(4), **options)
        limits = {"max_num_batched_tokens": 64, "has_positions": False, "cache_bytes": None}
        return make_picture_spec(vision, row_bytes=32, max_model_len=10**6, **limits).sizes

    assert sizes(most_patches=1000)[-1] == sizes(most_patches=1024)[-1] == 1024
    assert sizes(most_patches=10**6) == sizes()


def test_the_cache_has_room_for_the_largest_picture_unless_the_user_says():
    assert make_spec(length=300).num_rows == 4 * 300 + 1
    assert make_spec(length=10**6).num_rows == 4 * 10**6 + 1
    assert make_spec(cache_bytes=320).num_rows == 11


def test_a_picture_is_padded_and_its_padding_goes_to_the_null_row():
    picture = FakeProcessor().image(pixels(1))
    call = pack_encode(picture, np.array([9, 3, 4, 5, 6, 7], np.int32), make_spec())
    assert call.program == "encode P=256"
    rows, patches = call.buffers
    assert rows.tolist() == [9, 3, 4, 5, 6, 7] + [0] * 58
    assert patches.shape == (256, 3) and not patches[24:].any()
    (shape,) = abstract_inputs(FakeVision(4), 256).values()
    assert (shape.shape, shape.dtype) == (patches.shape, patches.dtype)


def test_embeddings_go_to_their_rows_and_from_there_to_their_tokens():
    state = {"pictures": jnp.zeros((8, 4), jnp.uint32)}
    embeds = np.arange(1, 13, dtype=np.float32).reshape(3, 4)

    class Model:
        @staticmethod
        def visual(*, patches):
            return patches

    rows = jnp.array([5, 2, 0])
    state = encode_into(state, Model, rows, {"patches": jnp.asarray(embeds)}, jnp.float32)
    plain = ForwardInput(token_ids=jnp.zeros(3, jnp.int32), positions=jnp.arange(3), attention=None)
    found = with_pictures(plain, state, jnp.array([0, 2, 5]), jnp.float32)
    np.testing.assert_array_equal(found.is_embed, [False, True, True])
    np.testing.assert_array_equal(found.embeds[1:], embeds[[1, 0]])
    others = dataclasses.replace(
        plain, embeds=jnp.full((3, 4), 7.0), is_embed=jnp.array([True, False, False])
    )
    both = with_pictures(others, state, jnp.array([0, 2, 0]), jnp.float32)
    np.testing.assert_array_equal(both.is_embed, [True, True, False])
    np.testing.assert_array_equal(both.embeds[:2], [[7.0] * 4, embeds[1]])


@pytest.mark.parametrize("has_positions", [False, True])
def test_what_goes_up_lies_at_its_tokens(has_positions):
    spec = make_spec(has_positions=has_positions)
    bucket = Bucket(16, 4, False)
    layout = step_layout(bucket, block_size=8, decode_steps=1, pictures=spec)
    positions = [(1, np.array([[3, 4], [5, 6], [7, 8]], np.int32))] if has_positions else []
    plan = StepPlan(
        slots=[1, 2],
        starts=[0, 5],
        num_tokens=[3, 4],
        samples=[True, True],
        picture_tokens=[(0, 2, np.array([8], np.int32)), (1, 1, np.array([3, 4], np.int32))],
        positions=positions,
    )
    programs = StepPrograms(bucket, None)
    (call,) = pack(plan, programs, {bucket.name: layout}, spec)
    views = layout.views(call.buffers[0])
    assert views["picture_rows"].tolist() == [0, 0, 8, 0, 3, 4] + [0] * 10
    if has_positions:
        expected = np.full((3, 16), -1)
        expected[:, 3:5] = positions[0][1]
        np.testing.assert_array_equal(views["positions"], expected)
    else:
        assert "positions" not in views


def test_layouts_of_other_models_have_no_fields_for_pictures():
    assert picture_fields(None, 16) == ()
    names = {f.name for f in step_layout(Bucket(16, 4, False), block_size=8, decode_steps=1).fields}
    assert not names & {"picture_rows", "positions"}
    decode = step_layout(Bucket(4, 4, True), block_size=8, decode_steps=1, pictures=make_spec())
    assert not {f.name for f in decode.fields} & {"picture_rows", "positions"}


def test_a_token_of_a_picture_is_no_decode_step():
    """Also if it is the only one that a row has left to compute."""
    buckets = (Bucket(4, 4, True), Bucket(16, 4, False))
    plan = StepPlan(slots=[1], starts=[5], num_tokens=[1], samples=[True])
    assert fitting_buckets(buckets, plan) == [buckets[0]]
    plan.picture_tokens = [(0, 0, np.array([3], np.int32))]
    assert fitting_buckets(buckets, plan) == [buckets[1]]
    plan.picture_tokens, plan.positions = [], [(0, np.zeros((3, 1), np.int32))]
    assert fitting_buckets(buckets, plan) == [buckets[1]]


def test_the_encoder_is_lowered_from_shapes():
    inputs = abstract_inputs(FakeVision(4), 512)
    assert inputs == {"patches": jax.ShapeDtypeStruct((512, 3), np.float32)}
