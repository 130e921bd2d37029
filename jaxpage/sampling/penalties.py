"""Repetition, frequency and presence penalties. Meaning and order are vLLM's.

Counts come from the token history that the device keeps, so no count goes up, is kept, or can go stale after a
preemption. Knows nothing of what happens to the logits before or after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.sampling.fields import RequestState, SamplerFeature, SlotField

if TYPE_CHECKING:
    from jaxpage.request import Request

_CHUNK = 256  # tokens of history that are counted at a time


def penalise(
    logits: jax.Array, state: RequestState, slots: jax.Array, positions: jax.Array
) -> jax.Array:
    """float32[R, V].

    Repetition: tokens of prompt or output, positive logits divided by the penalty, the others multiplied. Then, of
    the output alone, the frequency penalty for each occurrence and the presence penalty once.
    """
    seen, counts = count_history(state, slots, positions, logits.shape[1])
    repetition = state["repetition_penalty"][slots][:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - state["frequency_penalty"][slots][:, None] * counts.astype(jnp.float32)
    return logits - state["presence_penalty"][slots][:, None] * (counts > 0).astype(jnp.float32)


def count_history(
    state: RequestState, slots: jax.Array, positions: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """(bool[R, V] the token is in prompt or output, int32[R, V] how often it is in the output).

    The loop ends with the longest row, not with max_model_len.
    """
    num_rows, max_len = slots.shape[0], state["token_ids"].shape[1]
    chunk = min(_CHUNK, max_len)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    longest = positions.max()
    prompt_lens = state["prompt_len"][slots][:, None]
    starts = state["first_token"][slots][:, None]

    def count(carry):
        begin, counts = carry
        # The last chunk is moved back to fit; what it then holds of the one before is not counted twice.
        first = jnp.minimum(begin, max_len - chunk)
        index = first + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        ids = lax.dynamic_slice_in_dim(state["token_ids"], first, chunk, axis=1)[slots]
        column = jnp.where(index < prompt_lens, ids, vocab_size + ids)
        counted = (index >= jnp.maximum(begin, starts)) & (index < positions[:, None])
        column = jnp.where(counted, column, 2 * vocab_size)
        return begin + chunk, counts.at[rows, column].add(1, mode="drop")

    # Prompt and output side by side: one scatter for both.
    counts = jnp.zeros((num_rows, 2 * vocab_size), jnp.int32)
    _, counts = lax.while_loop(lambda carry: carry[0] < longest, count, (jnp.int32(0), counts))
    output_counts = counts[:, vocab_size:]
    return (counts[:, :vocab_size] > 0) | (output_counts > 0), output_counts


def _asked(request: Request) -> bool:
    p = request.params
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)


PENALTIES = SamplerFeature(
    name="penalties",
    fields=(
        # where token ids begin: a prompt of embeddings has none
        SlotField(
            name="first_token",
            value=lambda r, _: None if r.prompt_embeds is None else len(r.prompt_embeds),
        ),
        SlotField(
            name="repetition_penalty",
            dtype="float32",
            fill=1.0,
            value=lambda r, _: r.params.repetition_penalty,
        ),
        SlotField(
            name="frequency_penalty",
            dtype="float32",
            value=lambda r, _: r.params.frequency_penalty,
        ),
        SlotField(
            name="presence_penalty",
            dtype="float32",
            value=lambda r, _: r.params.presence_penalty,
        ),
    ),
    asked=_asked,
    apply=penalise,
)
