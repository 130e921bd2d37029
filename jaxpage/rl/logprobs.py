"""The dense, differentiable forward pass with which a trainer computes logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.recurrence import WholeSequences
from jaxpage.rl.rollout import Padded

_ROWS = 8  # of a batch, computed together


def logprobs(model: Any, batch: Padded, temperature: float = 1.0) -> jax.Array:
    """float32[N, L]: of each sampled token given those before it, at a temperature above 0; 0 for all others.

    `model`: one of jaxpage's, for example from `load_module`. Padding, on either side, is never attended to. Holds the
    logits of all positions, float32[N, L, V].
    """
    token_ids = jnp.asarray(batch.token_ids)
    # A token attends to those of lower or equal position.
    positions = jnp.where(batch.attention_mask, batch.positions, token_ids.shape[1])
    inputs = ForwardInput(
        token_ids=token_ids,
        positions=positions,
        attention=DenseAttention(positions),
        recurrence=WholeSequences(jnp.asarray(batch.attention_mask)),
    )
    logits = model.logits(model.hidden_states(inputs))[:, :-1] / temperature
    logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    found = jnp.take_along_axis(logits, token_ids[:, 1:, None], axis=-1)[..., 0]
    found = jnp.pad(found, ((0, 0), (1, 0)))
    return jnp.where(batch.completion_mask, found, 0.0)


def logprobs_of_rows(
    compute: Callable[[Any, Padded, float], jax.Array],
    model: Any,
    batch: Padded,
    temperature: float,
) -> np.ndarray:
    """The result of `compute`, such as `logprobs`, for a batch, as a NumPy array, a few rows at a time. Keeps nothing
    for gradients.
    """
    graphdef, state = nnx.split(model)

    @jax.jit
    def of_rows(state: Any, rows: Padded) -> jax.Array:
        return compute(nnx.merge(graphdef, state), rows, temperature)

    num_rows = len(batch.token_ids)
    parts = []
    for start in range(0, num_rows, _ROWS):
        rows = np.arange(start, start + _ROWS) % num_rows  # all parts have the same shape
        part = jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], batch)
        parts.append(np.asarray(of_rows(state, part)))
    return np.concatenate(parts)[:num_rows]
