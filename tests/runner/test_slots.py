"""The state of requests, by slot."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.plan import NULL_SLOT
from jaxpage.runner.layout import Field, Layout
from jaxpage.runner.slots import FEATURES_START, keep_hidden, make_admit, store_drafts


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hidden_states_of_rows_are_in_their_slots_and_those_of_padding_in_no_other(on_gpu, dtype):
    last = np.arange(5 * 4).reshape(5, 4).astype(jnp.dtype(dtype))
    words = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    state = {"hidden": np.full((7, 4), 9, words)}
    slots = np.array([3, NULL_SLOT, 6, NULL_SLOT, 1], np.int32)
    keep = jax.jit(partial(keep_hidden, on_gpu=on_gpu))
    hidden = np.asarray(keep(state, slots, last)["hidden"])
    for slot, row in ((3, 0), (6, 2), (1, 4)):
        np.testing.assert_array_equal(hidden[slot], last[row].view(words))
    assert (hidden[[2, 4, 5]] == 9).all()


def test_drafts_are_stored_behind_the_known_tokens_of_their_rows():
    """Rows that compute one known token and their drafts: three, one and none; then padding."""
    rows = {
        "slots": [2, 4, 1, NULL_SLOT],
        "starts": [5, 0, 7, 0],
        "num_tokens": [4, 2, 1, 0],
        "num_drafts": [3, 1, 0, 0],
        "drafts": [[11, 12, 13], [21, 0, 0], [0, 0, 0], [0, 0, 0]],
    }
    arrays = {name: np.array(values, np.int32) for name, values in rows.items()}
    state = {"token_ids": np.full((5, 9), 7, np.int32)}
    stored = jax.jit(store_drafts)(state, arrays)["token_ids"]
    wanted = np.full((5, 9), 7)
    wanted[2, 6:9], wanted[4, 1] = [11, 12, 13], 21
    np.testing.assert_array_equal(stored, wanted)


def test_a_new_sequence_has_no_features_of_the_last_one_in_its_slot():
    """A head would write their pair behind a prefix that others have computed."""
    layout = Layout((Field("slot"), Field("prompt_len")))
    state = {
        "prompt_len": np.array([0, 7, 7], np.int32),
        "finished": np.array([True, False, True]),
        FEATURES_START: np.array([0, 6, 6], np.int32),
    }
    admitted = make_admit(layout)(jax.tree.map(jnp.asarray, state), jnp.array([2, 5], jnp.int32))
    np.testing.assert_array_equal(admitted["prompt_len"], [0, 7, 5])
    np.testing.assert_array_equal(admitted["finished"], [True, False, False])
    start = np.asarray(admitted[FEATURES_START])
    assert start[1] == 6 and start[2] < -1_000_000
