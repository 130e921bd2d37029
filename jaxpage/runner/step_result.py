"""The results of a step while they are still on the device, and the hidden states that `forward` passes on.

Knows the arrays of a result. Must not know how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpage.batch import StepBatch
from jaxpage.kv_pool import KVPool
from jaxpage.runner.slots import EXPERT_LOAD
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.sampler import Sampled


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """A padded `plan.StepResult` on the device.

    P tokens of a row (1 unless the program is `decode` or `verify`), R rows, W top logprobs, J captured points.
    """

    sampled: Sampled  # every field with a leading axis P
    num_sampled: jax.Array  # int32[R]
    expert_load: jax.Array | None = None  # int32[layers with experts, X] of the launch
    captured: jax.Array | None = None  # [R, J, E] of the last step

    def with_step(self, index: jax.Array, sampled: Sampled, samples: jax.Array) -> DeviceResult:
        """The result with what rows sampled as their token `index`; bool[R] `samples` says which of them did."""
        return replace(
            self,
            sampled=jax.tree.map(lambda x, new: x.at[index].set(new), self.sampled, sampled),
            num_sampled=self.num_sampled + samples.astype(jnp.int32),
        )


class Computed(NamedTuple):
    """The outcome of running a step's tokens through the layers."""

    kv_pool: KVPool  # with the tokens' keys and values
    state: RequestState
    batch: StepBatch
    hidden: jax.Array  # [T, E]
    captured: jax.Array | None = None  # [T, J, E]; None: nothing is captured


def to_pieces(values: jax.Array, size: int) -> list[jax.Array]:
    """Split [T, ...] into pieces of [size, ...], the last one padded."""
    missing = -values.shape[0] % size
    padding = ((0, missing), *[(0, 0)] * (values.ndim - 1))
    return jnp.split(jnp.pad(values, padding), (values.shape[0] + missing) // size)


def split_pieces(
    pieces: list[jax.Array], spec: StepSpec
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Split what `forward` returns into hidden states and captured values, if any: as many pieces of each."""
    has_captures = spec.research is not None and bool(spec.research.captures)
    num_hidden = len(pieces) // 2 if has_captures else len(pieces)
    return pieces[:num_hidden], pieces[num_hidden:]


def with_load(state: RequestState, result: DeviceResult) -> tuple[RequestState, DeviceResult]:
    """Move the expert counts of a launch from the state to the result."""
    if EXPERT_LOAD not in state:
        return state, result
    load = state[EXPERT_LOAD]
    return state | {EXPERT_LOAD: jnp.zeros_like(load)}, replace(result, expert_load=load)


def empty_result(num_tokens: int, num_rows: int, spec: StepSpec) -> DeviceResult:
    """For so many tokens of each row."""
    shape, top = (num_tokens, num_rows), spec.num_top_logprobs
    return DeviceResult(
        sampled=Sampled(
            token_ids=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            ranks=jnp.zeros(shape, jnp.int32),
            top_token_ids=jnp.zeros((*shape, top), jnp.int32),
            top_logprobs=jnp.zeros((*shape, top), jnp.float32),
        ),
        num_sampled=jnp.zeros(num_rows, jnp.int32),
    )


def nothing_captured(num_rows: int, spec: StepSpec) -> jax.Array | None:
    """What a decode step of so many rows captures, all zero; None if it captures nothing."""
    if spec.research is None or not spec.research.captures:
        return None
    shape = (num_rows, len(spec.research.captures), spec.hidden_size)
    return jnp.zeros(shape, spec.dtype)
