"""A request and its sequences: data that the engine moves forward, no behaviour of its own.

Progress is numbers. A sequence knows `num_known_tokens` tokens and has KV for `num_computed_tokens` of them; every
step moves the second towards the first. Prefill, chunked prefill, cache hits, decoding and recomputation after a
preemption are that one subtraction.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxpage.captures import WantedCaptures
from jaxpage.lora_request import Adapter
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.reasoning import ReasoningTokens
from jaxpage.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the strings are vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class WaitingFor(enum.Enum):
    """Why a sequence that runs may not advance for now."""

    # a beam: the others of its request have yet to sample, or the first one to be computed
    BEAMS = enum.auto()
    # all its tokens are computed; the mask for sampling the next is not there yet
    MASK = enum.auto()
    # the token that it samples, on which its next mask depends, is in flight
    TOKEN = enum.auto()
    # the next token is a picture's, which cannot be encoded in this step
    PICTURE = enum.auto()


class MaskSource(Protocol):
    """Who says which tokens may come next: a grammar. It belongs to one request, and never raises."""

    def mask(self, index: int, output_token_ids: Items[int]) -> np.ndarray | None:
        """What continuation `index` may sample after these tokens: uint32[ceil(V / 32)], a bit each, lowest bit first.

        None: not known yet, or never; `error` tells. Asked again for the same tokens after that, or after a preemption.
        """
        ...

    def forced(self, index: int, output_token_ids: Items[int]) -> list[int]:
        """Tokens that come next because there is no choice; perhaps none. They are appended without being sampled."""
        ...

    def error(self, index: int) -> str | None:
        """Why there will be no more masks for continuation `index`, which ends with that; None while all is well."""
        ...

    def wait(self, seconds: float) -> None:
        """Block until some `mask` of this kind of source that returned None may return something else, or for so long.

        The engine has nothing else to do.
        """
        ...

    def restart(self) -> None:
        """Forget all tokens: the request is answered anew."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One prompt being answered. Built by the user-facing layer, owned by the engine from `add` on."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    # uint32; the request's own, or derived from the engine's seed and the request's number
    seed: int
    # every id that ends a sequence: EOS (unless ignored) and the user's
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()  # the part of them for which `stop_reason` is None
    # every EOS id of the model, also if `ignore_eos`: masked, like stop ids, until min_tokens
    all_eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning: ReasoningTokens | None = None  # not None with a thinking_token_budget
    prompt: str | None = None
    priority: int = 0  # lower is served first; only the `priority` policy reads it
    cache_salt: str | None = None
    adapter: Adapter | None = None  # beside the model's weights
    trace_headers: Mapping[str, str] | None = None  # its caller's W3C trace context, for observers
    arrival: int = 0  # number of the request in order of arrival, set by the engine
    # Its rows are tokens in and at most one out, nothing else: most requests, and each row asks. Set by the engine.
    is_plain: bool = False
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch
    # the same moment on the clock of the times below
    queued_time: float = field(default_factory=time.monotonic)
    features: int = 0  # feature bits of its params; computed outside the engine
    # Values of the declared slot fields that follow from the request.
    slot_fields: Mapping[str, Any] = field(default_factory=dict)
    # [T, E]; stands in for the prompt's token ids (which are then all 0)
    prompt_embeds: np.ndarray | None = None
    pictures: PromptPictures | None = (
        None  # whose embeddings stand in for some of the prompt's tokens
    )
    # The log-probabilities of every token are wanted where it samples: more than a step says of its own.
    wants_vocabulary: bool = False
    scores_prompt: bool = False  # the log-probabilities of the prompt's tokens are wanted
    wants_prompt_vocabulary: bool = False  # and those of every token in their place
    mask_source: MaskSource | None = None  # who says which tokens may come next; None: all may
    captures: WantedCaptures | None = None  # what is wanted of the inside of the model
    sequences: list[Sequence] = field(default_factory=list)
    beams: Any = (
        None  # jaxpage.engine.beams.Beams of a beam search; None: the sequences are samples
    )
    # What became of it: the engine writes these numbers, the output processor reads them.
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    num_cache_creation_tokens: int = 0  # the others, as far as they fill blocks of the prefix cache
    num_preemptions: int = 0
    num_scored_tokens: int = 0  # of the prompt, from the second on; with prompt_logprobs
    first_scheduled_time: float | None = None  # seconds, monotonic

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.finished for s in self.sequences)


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One of the n continuations of a request."""

    request: Request
    index: int  # 0 .. n-1
    token_ids: list[int]  # prompt and output tokens that the host has seen
    max_len: int  # tokens at which the sequence ends: min(prompt + max_tokens, max_model_len)
    num_computed_tokens: int = 0  # tokens whose KV is in the pool once all launched steps are done
    num_in_flight: int = 0  # sampled by launched steps, not yet collected
    # Of `token_ids`, at the end: appended by the host, and not yet among the device's.
    num_unsent_tokens: int = 0
    num_reported_tokens: int = 0  # of `token_ids`; only with a mask source
    # What its request wants captured of so many tokens, from the first on, is; only with captures.
    num_captured_tokens: int = 0
    waiting_for: WaitingFor | None = None
    # Block ids in the order of positions, a table for each KV-cache group (see `kv_groups`); NULL_BLOCK where the block
    # is behind the group's window. No tables while the sequence has no slot.
    block_tables: list[list[int]] = field(default_factory=list)
    # Tokens up to which it may be computed as it is; beyond them, ask `KVCache.grow`.
    writable_len: int = 0
    num_unseen_blocks: int = 0  # entries of `block_tables` that are NULL_BLOCK
    # The same with host blocks, which have the KV of its computed tokens while it is swapped out.
    host_tables: list[list[int]] = field(default_factory=list)
    # of the full blocks of `token_ids`, a prefix of them
    block_hashes: list[bytes] = field(default_factory=list)
    # How many of a table's blocks stand in the prefix cache under their hash, if they may.
    num_registered_blocks: int = 0
    # Some of its KV was computed with other weights than the rest: its blocks do not enter the prefix cache.
    has_mixed_kv: bool = False
    # (how often the weights had been replaced, the first output token that these sampled), ascending
    weight_starts: list[tuple[int, int]] = field(default_factory=list)
    slot: int = 0  # request slot on the device; 0 (the null slot) while it has none
    finish_reason: FinishReason | None = None
    # the stop id, "repetition_detected", or what the error was; else None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]
