"""What the model is given besides tokens and attention: embeddings, pictures, rotary positions, adapters."""

from __future__ import annotations

from dataclasses import replace

import jax
from jax import lax

from jaxpage.batch import StepBatch
from jaxpage.models.inputs import ForwardInput
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.encoder import with_pictures
from jaxpage.runner.packed_tokens import Rows, rotary_positions, token_rows
from jaxpage.runner.slots import ADAPTER, has_positions
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState


def with_extras(
    inputs: ForwardInput,
    state: RequestState,
    rows: Rows,
    batch: StepBatch,
    bucket: Bucket,
    spec: StepSpec,
    embeds: tuple[jax.Array, ...],
) -> ForwardInput:
    """The inputs with what the requests of a step have. embeds: see `Step.forward`."""
    if embeds:
        words, where = embeds
        values = lax.bitcast_convert_type(words, spec.dtype)
        inputs = replace(inputs, embeds=values, is_embed=where)
    if spec.pictures is not None and not bucket.decode:
        inputs = with_pictures(inputs, state, rows["picture_rows"], spec.dtype)
    if has_positions(spec):
        positions = rotary_positions(state, rows, bucket, batch.positions)
        inputs = replace(inputs, positions=positions)
    if ADAPTER in state:
        inputs = replace(inputs, adapter_slots=state[ADAPTER][token_slots(batch, rows, bucket)])
    return inputs


def token_slots(batch: StepBatch, rows: Rows, bucket: Bucket) -> jax.Array:
    """int32[T]: the request slot of each token."""
    return batch.slots[token_rows(rows["num_tokens"], bucket)]
