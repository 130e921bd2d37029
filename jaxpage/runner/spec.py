"""What all programs of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxpage.kv_groups import KVGroups
from jaxpage.sampling.fields import Processors


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Shapes and static choices of an engine's programs."""

    block_size: int
    max_model_len: int  # C
    num_blocks_per_row: int  # M
    groups: KVGroups  # G
    num_slots: int  # Q, the null slot included
    vocab_size: int  # V
    hidden_size: int  # E
    dtype: DTypeLike  # of hidden states
    decode_steps: int  # most decode steps in one launch
    num_top_logprobs: int  # W
    logprobs_mode: str
    num_scored: int  # C, tokens of prompts that are scored at a time
    prompt_embeds: bool = False  # `forward` takes embeddings in the place of tokens
    processors: Processors = ()  # of logits, by the engine's user
    num_adapters: int = 0  # slots that the model has for adapters
