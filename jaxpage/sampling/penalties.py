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
_IN_PROMPT = 1 << 30  # more than a sequence has tokens


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

    The loops end with the longest row, not with max_model_len.
    """
    num_rows, max_len = slots.shape[0], state["token_ids"].shape[1]
    chunk = min(_CHUNK, max_len)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    prompt_lens = state["prompt_len"][slots]

    def scatter(update, counts, first, begins, ends):
        """`update(counts.at[...])` for the tokens [begins, ends), int32[R], of each row's history from `first` on."""

        def one_chunk(carry):
            begin, counts = carry
            # The last chunk is moved back to fit; what it then holds of the one before is not counted twice.
            start = jnp.minimum(begin, max_len - chunk)
            index = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
            ids = lax.dynamic_slice_in_dim(state["token_ids"], start, chunk, axis=1)[slots]
            counted = (index >= jnp.maximum(begin, begins[:, None])) & (index < ends[:, None])
            return begin + chunk, update(counts.at[rows, jnp.where(counted, ids, vocab_size)])

        return lax.while_loop(lambda carry: carry[0] < ends.max(), one_chunk, (first, counts))[1]

    counts = jnp.zeros((num_rows, vocab_size), jnp.int32)
    first_tokens = state["first_token"][slots]
    # Prompts first, since setting a flag overwrites a count.
    counts = scatter(
        lambda at: at.set(_IN_PROMPT, mode="drop"),
        *(counts, jnp.int32(0), first_tokens, jnp.minimum(prompt_lens, positions)),
    )
    first_output = jnp.where(positions > prompt_lens, prompt_lens, max_len).min()
    counts = scatter(
        lambda at: at.add(1, mode="drop"),
        *(counts, first_output, jnp.maximum(first_tokens, prompt_lens), positions),
    )
    return counts > 0, counts & (_IN_PROMPT - 1)


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
