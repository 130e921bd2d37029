"""Pictures to embeddings, on the device: a pure function, compiled once for each padded size.

Knows that a model has an encoder in `visual`; must not know families.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax


class VisionEncoder(Protocol):
    """A vision tower, an nnx.Module: the attribute `visual` of a model."""

    def __call__(self, *, patches: jax.Array, **indices: jax.Array) -> jax.Array:
        """patches float32[P, patch_values] and integer arrays, the `encoder_inputs` of one padded picture, to
        [P // patches_per_token, embedding_size] in the model's dtype, in the order of the placeholders.

        Rows from the picture's `num_tokens` on belong to padding; they are finite and mean nothing. Padding does
        not change the others.
        """
        ...


def encode(model: Any, **inputs: jax.Array) -> jax.Array:
    """The embeddings of one picture: `model.visual` of its `encoder_inputs`."""
    return model.visual(**inputs)
