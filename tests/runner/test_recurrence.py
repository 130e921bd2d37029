"""The state of sequences in their slots: any way to cut them into rows of steps gives what whole sequences give."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.batch import StepBatch
from jaxpage.models.recurrence import Recurrence, WholeSequences
from jaxpage.models.recurrent_config import MambaOptions, RecurrentLayers
from jaxpage.ops.delta_rule import AnyTokens, to_tokens
from jaxpage.ops.packed_delta_rule import MOST_DRAFTS
from jaxpage.recurrent_state import sequence_bytes
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.layouts import states_layout
from jaxpage.runner.recurrence import (
    SlotRecurrence,
    make_copy_states,
    recurrent_axes,
    recurrent_fields,
)
from pallas_kernels.mamba2 import reference as mamba2
from tests.models.test_delta_rule import HEADS, KEY_DIM, VALUE_DIM, VALUES, inputs

SIZES = RecurrentLayers(
    layers=(3,),
    num_key_heads=HEADS,
    values_per_key=VALUES,
    key_dim=KEY_DIM,
    value_dim=VALUE_DIM,
    num_taps=4,
)
OPTIONS = MambaOptions(
    projection_bias=False, convolution_bias=False, time_steps=(0.0, float("inf"))
)
MAMBA2 = replace(SIZES, mamba=OPTIONS)
# As many channels, and no matrices.
CONVOLUTION = replace(
    SIZES, num_key_heads=SIZES.num_channels, values_per_key=1, key_dim=0, value_dim=1
)
KINDS = ["delta rule", "Mamba-2", "convolution"]
each_kind = pytest.mark.parametrize("sizes", [SIZES, MAMBA2, CONVOLUTION], ids=KINDS)
LAYER, NUM_SLOTS, NUM_ROWS, NUM_TOKENS = 3, 6, 4, 160
LENGTH = 150  # of each sequence
WEIGHT = np.random.default_rng(9).standard_normal((SIZES.num_channels, 4)).astype(np.float32)


def convolved(recurrence: Recurrence, x: jax.Array, num_taps: int) -> jax.Array:
    """In three parts, as queries, keys and values."""
    ends = (5, 40)
    parts = recurrence.convolve(
        LAYER, jnp.split(x, ends, axis=-1), jnp.split(WEIGHT[:, :num_taps], ends)
    )
    return jnp.concatenate(parts, axis=-1)


def outputs(
    sizes: RecurrentLayers, recurrence: Recurrence, x: jax.Array, tokens: AnyTokens
) -> tuple[jax.Array, ...]:
    out = convolved(recurrence, x, sizes.num_taps)
    return (out, recurrence.advance(LAYER, tokens)) if sizes.has_matrix else (out,)


class Sequences:
    """Sequences 1, 2, ..., each in the slot of its number, and their steps on the device."""

    def __init__(self, number: int, sizes: RecurrentLayers = SIZES, *, num_drafts: int = 0):
        self.sizes, self.has_drafts = sizes, num_drafts > 0
        self.x = np.random.default_rng(5).standard_normal((number, LENGTH, SIZES.num_channels))
        self.x = self.x.astype(np.float32)
        self.tokens = tokens_of(sizes, number)
        whole = WholeSequences()
        self.expected = outputs(sizes, whole, jnp.asarray(self.x), self.tokens)
        # What was in a slot before its sequence must not show.
        fields = recurrent_fields(sizes, NUM_SLOTS, jnp.float32, num_drafts=num_drafts)
        self.state = jax.tree.map(
            lambda x: jnp.full_like(x, np.nan if x.dtype == jnp.float32 else -1), fields
        )
        self.done = dict.fromkeys(range(1, number + 1), 0)  # slot -> tokens

    def step(
        self,
        rows: list[tuple[int, int]],
        *,
        decode: bool = False,
        drafts: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Rows of (slot, number of tokens), whose outputs must be those of the whole sequence.

        drafts: for each of the first rows how many of its last tokens are, and how many of these are right.
        """
        drafts += ((0, 0),) * (NUM_ROWS - len(drafts))
        wrong = [number - right for number, right in drafts]
        counts = [count for _, count in rows] + [0] * (NUM_ROWS - len(rows))
        slots = [slot for slot, _ in rows] + [0] * (NUM_ROWS - len(rows))
        size = NUM_ROWS if decode else NUM_TOKENS
        starts = [self.done.get(slot, 0) for slot in slots]
        ends = np.cumsum([0, *counts])
        if decode:  # each row has a token, which means nothing in the others
            counts, ends = [1] * NUM_ROWS, np.arange(NUM_ROWS + 1)
        lens = [
            start + count if slot else 0
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        lens = [length if count else 0 for length, count in zip(lens, counts, strict=True)]

        def packed(x: np.ndarray) -> np.ndarray:
            out = np.full((size, *x.shape[2:]), 0.25, np.float32)  # padding, which must not show
            for (slot, count), start, first, bad in zip(rows, starts, ends, wrong, strict=False):
                out[first : first + count] = x[slot - 1, start : start + count]
                out[first + count - bad : first + count] = x[slot - 1, :bad]
            return out

        batch = StepBatch(
            slots=jnp.array(slots, jnp.int32),
            query_starts=jnp.array(ends, jnp.int32),
            kv_lens=jnp.array(lens, jnp.int32),
            token_ids=jnp.zeros(size, jnp.int32),
            positions=jnp.zeros(size, jnp.int32),
            slot_mappings=jnp.zeros((1, size), jnp.int32),
            block_tables=jnp.zeros((1, NUM_ROWS, 1), jnp.int32),
        )
        given = jax.tree.map(lambda x: packed(np.asarray(x)), self.tokens)
        run = _step(self.sizes, Bucket(size, NUM_ROWS, decode=decode))
        numbers = jnp.array([number for number, _ in drafts], jnp.int32)
        numbers = numbers if self.has_drafts and not decode else None
        self.state, *found = run(self.state, batch, packed(self.x), given, numbers)
        for (slot, count), start, first, bad in zip(rows, starts, ends, wrong, strict=False):
            right = count - bad
            for one, whole in zip(found, self.expected, strict=True):
                wanted = whole[slot - 1, start : start + right]
                np.testing.assert_allclose(one[first : first + right], wanted, atol=2e-5, rtol=0)
            self.done[slot] += right


def tokens_of(sizes: RecurrentLayers, number: int) -> AnyTokens:
    q, k, v, log_decay, beta = inputs(LENGTH, batch=number)
    if sizes.mamba is None:
        return to_tokens(q, k, v, log_decay, beta)
    # Of length 1, so that errors are as large as above.
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    joined = v.reshape(*v.shape[:3], -1)
    return mamba2.Tokens(*map(jnp.asarray, (q, k, joined, log_decay)))


@cache
def _step(sizes: RecurrentLayers, bucket: Bucket):
    @jax.jit
    def run(state, batch, x, tokens, num_drafts):
        how = {"on_gpu": False, "num_drafts": num_drafts}
        recurrence = SlotRecurrence(sizes, state, batch, bucket, **how)
        out = outputs(sizes, recurrence, x, tokens)
        return recurrence.state, *out

    return run


@each_kind
def test_rows_of_all_lengths_in_chunks_and_beside_others(sizes):
    sequences = Sequences(3, sizes)
    for rows in (
        [(1, 150)],
        [(2, 1), (3, 65)],
        [(3, 2), (2, 3)],
        [(2, 64), (3, 1)],
        [(3, 80), (2, 80)],
    ):
        sequences.step(rows)


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("prompt", [1, 2, 67])
def test_decoding_goes_on_from_a_prompt(prompt, sizes):
    sequences = Sequences(2, sizes)
    sequences.step([(2, prompt), (1, prompt)])
    for _ in range(5):
        sequences.step([(1, 1), (2, 1)], decode=True)
    sequences.step([(1, 1), (2, 70)])


@pytest.mark.slow
def test_a_slot_is_as_new_for_the_next_sequence():
    sequences = Sequences(2)
    sequences.step([(1, 90), (2, 20)])
    sequences.done[1] = 0
    sequences.step([(2, 1), (1, 33)])
    sequences.done[2] = 0
    sequences.step([(1, 1), (2, 1)], decode=True)


@pytest.mark.parametrize(
    ("prompt", "sizes"), [(1, SIZES), (30, SIZES), (30, MAMBA2), (1, CONVOLUTION)]
)
def test_siblings_start_with_the_state_after_the_prompt(prompt, sizes):
    sequences = Sequences(2, sizes)
    sequences.x[1] = sequences.x[0]
    sequences.tokens = jax.tree.map(lambda x: jnp.asarray(x).at[1].set(x[0]), sequences.tokens)
    sequences.expected = tuple(x.at[1].set(x[0]) for x in sequences.expected)
    sequences.done[2] = prompt  # slot 2 goes on where slot 1 is
    sequences.step([(1, prompt), (2, 0)])
    sequences.step([(2, 40), (1, 1)])


@pytest.mark.parametrize(
    "sizes",
    [SIZES, *(pytest.param(each, marks=pytest.mark.slow) for each in (MAMBA2, CONVOLUTION))],
    ids=KINDS,
)
def test_wrong_drafts_leave_nothing_and_right_ones_count(sizes):
    """Rows of a prompt, of one token, and with drafts of which all, some or none are right, beside each other."""
    sequences = Sequences(3, sizes, num_drafts=3)
    sequences.step([(1, 20), (2, 1)])
    sequences.step([(1, 4), (2, 3), (3, 70)], drafts=((3, 2), (2, 0)))
    sequences.step([(1, 4), (2, 1), (3, 4)], drafts=((3, 3), (0, 0), (3, 1)))
    sequences.step([(2, 4), (3, 1)], drafts=((3, 3),))
    sequences.step([(1, 1), (2, 1), (3, 1)], decode=True)
    sequences.step([(1, 1), (2, 1), (3, 1)], decode=True)
    sequences.step([(2, 2), (1, 4)], drafts=((1, 1), (3, 0)))
    sequences.step([(1, 1), (2, 2)], drafts=((0, 0), (1, 1)))
    # Another sequence in the slot of one with accepted drafts.
    sequences.done[2] = 0
    sequences.step([(2, 9), (1, 1)])
    sequences.step([(2, 1)], decode=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, MOST_DRAFTS])
def test_the_fewest_and_the_most_drafts(num_drafts):
    sequences = Sequences(2, num_drafts=num_drafts)
    sequences.step([(1, 2), (2, 70)])
    all_right = (num_drafts, num_drafts)
    sequences.step([(1, 1 + num_drafts), (2, 1 + num_drafts)], drafts=(all_right, (num_drafts, 0)))
    sequences.step([(1, 1 + num_drafts), (2, 2)], drafts=(all_right, (1, 1)))
    sequences.step([(1, 1), (2, 1)], decode=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, CONVOLUTION], ids=["delta rule", "convolution"])
def test_drafts_before_a_convolution_with_one_tap(sizes):
    sequences = Sequences(2, replace(sizes, num_taps=1), num_drafts=2)
    sequences.step([(1, 5), (2, 1)])
    sequences.step([(1, 3), (2, 3)], drafts=((2, 1), (2, 2)))
    sequences.step([(2, 1), (1, 1)], decode=True)


@each_kind
def test_drafts_keep_as_many_bytes_as_counted(sizes):
    fields = recurrent_fields(sizes, NUM_SLOTS, jnp.bfloat16, num_drafts=3)
    lengths = fields.pop("recurrent_length")
    assert lengths.shape == (NUM_SLOTS,)
    total = sum(field.nbytes for field in fields.values())
    assert total == NUM_SLOTS * sequence_bytes(sizes, jnp.bfloat16, num_drafts=3)
    if sizes.has_matrix:
        tokens = jax.tree.leaves(tokens_of(sizes, 1))[1:]
        assert sizes.num_changes == sum(x[0, 0].size for x in tokens)


@pytest.mark.slow
def test_a_copied_state_counts_the_same_tokens():
    """A sequence that begins behind a cached prefix has drafts in the step after."""
    sequences = Sequences(2, num_drafts=2)
    sequences.x[1] = sequences.x[0]
    sequences.tokens = jax.tree.map(lambda x: jnp.asarray(x).at[1].set(x[0]), sequences.tokens)
    sequences.expected = tuple(x.at[1].set(x[0]) for x in sequences.expected)
    sequences.step([(1, 30)])
    layout = states_layout()
    packed = layout.new_buffer()
    views = layout.views(packed)
    views["num"][...], views["sources"][0], views["destinations"][0] = 1, 1, 2
    sequences.state = jax.jit(make_copy_states(layout))(sequences.state, packed)
    sequences.done[2] = 30
    sequences.step([(1, 3), (2, 3)], drafts=((2, 1), (2, 2)))
    sequences.step([(2, 1), (1, 1)], decode=True)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_layers_that_only_convolve_keep_inputs_and_nothing_else(num_devices):
    fields = recurrent_fields(CONVOLUTION, NUM_SLOTS, jnp.bfloat16)
    assert {name: x.shape for name, x in fields.items()} == {
        f"convolution_{LAYER}": (NUM_SLOTS, 3 * CONVOLUTION.num_channels)
    }
    divides = CONVOLUTION.num_channels % num_devices == 0
    assert set(recurrent_axes(CONVOLUTION, num_devices)) == (set(fields) if divides else set())


@pytest.mark.slow
def test_other_slots_stay_as_they_are():
    sequences = Sequences(1)
    before = jax.tree.map(np.asarray, sequences.state)
    sequences.step([(1, 70)])
    sequences.step([(1, 1)], decode=True)
    for name, field in sequences.state.items():
        np.testing.assert_array_equal(np.asarray(field)[2:], before[name][2:])
        assert name.startswith("convolution") or np.isfinite(np.asarray(field)[1]).all()
