"""The state of requests, by slot."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.plan import NULL_SLOT
from jaxpage.runner.slots import keep_hidden, store_drafts


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hidden_states_of_rows_are_in_their_slots_and_those_of_padding_in_no_other(on_gpu, dtype):
    last = jnp.arange(5 * 4, dtype=dtype).reshape(5, 4)
    words = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    state = {"hidden": jnp.full((7, 4), 9, words)}
    slots = jnp.asarray([3, NULL_SLOT, 6, NULL_SLOT, 1], jnp.int32)
    hidden = np.asarray(keep_hidden(state, slots, last, on_gpu=on_gpu)["hidden"])
    for slot, row in ((3, 0), (6, 2), (1, 4)):
        np.testing.assert_array_equal(hidden[slot], np.asarray(last[row]).view(words))
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
    arrays = {name: jnp.asarray(values, jnp.int32) for name, values in rows.items()}
    stored = store_drafts({"token_ids": jnp.full((5, 9), 7, jnp.int32)}, arrays)["token_ids"]
    wanted = np.full((5, 9), 7)
    wanted[2, 6:9], wanted[4, 1] = [11, 12, 13], 21
    np.testing.assert_array_equal(stored, wanted)
