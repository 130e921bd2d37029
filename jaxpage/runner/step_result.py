"""What a step leaves, while it is still on the device: its results, and what `forward` hands on.

What this file knows: the arrays of a result. What it must never learn: how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpage.batch import StepBatch
from jaxpage.kv_pool import KVPool
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.slots import EXPERT_LOAD
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.sampler import Sampled


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """`plan.StepResult` still on the device and padded. P decode steps (1 in a mixed step), R rows, W top logprobs."""

    sampled: Sampled  # every field with a leading axis P
    num_sampled: jax.Array  # int32[R]
    expert_load: jax.Array | None = None  # int32[layers with experts, X] of the launch
    captured: jax.Array | None = None  # [R, P, E] of the last step


class Computed(NamedTuple):
    """What a step's tokens have left when they are through the layers."""

    kv_pool: KVPool  # with their keys and values
    state: RequestState
    batch: StepBatch
    hidden: jax.Array  # [T, E]
    captured: jax.Array | None = None  # [T, P, E]; None: nothing is captured


def to_pieces(values: jax.Array, size: int) -> list[jax.Array]:
    """[size, ...] each, of [T, ...]; the last one is padded."""
    missing = -values.shape[0] % size
    padding = ((0, missing), *[(0, 0)] * (values.ndim - 1))
    return jnp.split(jnp.pad(values, padding), (values.shape[0] + missing) // size)


def split_pieces(
    pieces: list[jax.Array], spec: StepSpec
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What `forward` returns: the hidden states, and what is captured, as many pieces if anything is."""
    has_captures = spec.research is not None and bool(spec.research.captures)
    num_hidden = len(pieces) // 2 if has_captures else len(pieces)
    return pieces[:num_hidden], pieces[num_hidden:]


def with_load(state: RequestState, result: DeviceResult) -> tuple[RequestState, DeviceResult]:
    """At the end of a launch what it counted of experts goes from the state to the result."""
    if EXPERT_LOAD not in state:
        return state, result
    load = state[EXPERT_LOAD]
    return state | {EXPERT_LOAD: jnp.zeros_like(load)}, replace(result, expert_load=load)


def empty_result(bucket: Bucket, spec: StepSpec) -> DeviceResult:
    shape, top = (spec.decode_steps, bucket.num_rows), spec.num_top_logprobs
    return DeviceResult(
        sampled=Sampled(
            token_ids=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            ranks=jnp.zeros(shape, jnp.int32),
            top_token_ids=jnp.zeros((*shape, top), jnp.int32),
            top_logprobs=jnp.zeros((*shape, top), jnp.float32),
        ),
        num_sampled=jnp.zeros(bucket.num_rows, jnp.int32),
        captured=_nothing_captured(bucket, spec),
    )


def _nothing_captured(bucket: Bucket, spec: StepSpec) -> jax.Array | None:
    if spec.research is None or not spec.research.captures:
        return None
    shape = (bucket.num_rows, len(spec.research.captures), spec.hidden_size)
    return jnp.zeros(shape, spec.dtype)
