"""A request and its sequences: data that the engine updates, without behaviour.

Progress is two numbers. A sequence knows `num_known_tokens` tokens and has KV for `num_computed_tokens` of them; every
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
from jaxpage.lora.request import Adapter
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
    """Why a running sequence cannot advance at the moment."""

    # a beam: other beams of its request have yet to sample, or the first one to be computed
    BEAMS = enum.auto()
    # all its tokens are computed, but the mask for sampling the next one has not arrived
    MASK = enum.auto()
    # the next mask depends on a token in flight
    TOKEN = enum.auto()
    # the next token belongs to a picture that cannot be encoded in this step
    PICTURE = enum.auto()


class MaskSource(Protocol):
    """Decides which tokens may come next, such as a grammar. It belongs to one request, and never raises."""

    def mask(self, index: int, output_token_ids: Items[int]) -> np.ndarray | None:
        """What continuation `index` may sample after these tokens: uint32[ceil(V / 32)], a bit each, lowest bit first.

        None: not known yet, or never (see `error`). Then, or after a preemption, it is called again with the same
        tokens.
        """
        ...

    def forced(self, index: int, output_token_ids: Items[int]) -> list[int]:
        """The tokens that must come next, possibly none. They are appended without being sampled."""
        ...

    def error(self, index: int) -> str | None:
        """Why there will be no more masks for continuation `index`, which then ends; None if there is no error."""
        ...

    def wait(self, seconds: float) -> None:
        """Block for at most `seconds`, until a `mask` that returned None (of any source of this kind) may be ready.

        The engine calls it when it has nothing else to do.
        """
        ...

    def restart(self) -> None:
        """Forget all tokens, because the request restarts."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One prompt being answered. Built by the user-facing layer, owned by the engine from `add` on."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    # uint32; given by the user, or derived from the engine's seed and the request's number
    seed: int
    # every id that ends a sequence: EOS (unless ignored) and the user's
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()  # those of them for which `stop_reason` is None
    # every EOS id of the model, even with `ignore_eos`: masked, like stop ids, until min_tokens
    all_eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning: ReasoningTokens | None = None  # not None with a thinking_token_budget
    prompt: str | None = None
    priority: int = 0  # lower is served first; only the `priority` policy reads it
    cache_salt: str | None = None
    replica: int | None = None  # which one shall answer it; None: any
    adapter: Adapter | None = None  # beside the model's weights
    trace_headers: Mapping[str, str] | None = None  # its caller's W3C trace context, for observers
    arrival: int = 0  # number of the request in order of arrival, set by the engine
    # Its rows compute tokens and sample at most one, nothing else, as for most requests. Set by the engine.
    is_plain: bool = False
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch
    # the same moment on the monotonic clock of the times below
    queued_time: float = field(default_factory=time.monotonic)
    features: int = 0  # feature bits of its params; computed outside the engine
    # values of the declared slot fields
    slot_fields: Mapping[str, Any] = field(default_factory=dict)
    # [T, E]; replaces the prompt's token ids (which are then all 0)
    prompt_embeds: np.ndarray | None = None
    # whose embeddings replace some of the prompt's tokens
    pictures: PromptPictures | None = None
    # return the log-probabilities of the whole vocabulary for each sampled token
    wants_vocabulary: bool = False
    scores_prompt: bool = False  # return the log-probabilities of the prompt's tokens
    wants_prompt_vocabulary: bool = False  # and of the whole vocabulary for each of them
    mask_source: MaskSource | None = None  # decides which tokens may come next; None: all may
    captures: WantedCaptures | None = None  # values inside the model to return
    sequences: list[Sequence] = field(default_factory=list)
    # jaxpage.engine.beams.Beams of a beam search; None: the sequences are samples
    beams: Any = None
    # Statistics, written by the engine and read by the output processor.
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    num_cache_creation_tokens: int = 0  # the other prompt tokens in full blocks
    num_preemptions: int = 0
    num_scored_tokens: int = 0  # of the prompt, from its second token on; with prompt_logprobs
    first_scheduled_time: float | None = None  # seconds, monotonic

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.finished for s in self.sequences)


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One of the n continuations of a request."""

    request: Request
    index: int  # 0 .. n-1
    token_ids: list[int]  # prompt and output tokens that the host knows
    max_len: int  # tokens at which the sequence ends: min(prompt + max_tokens, max_model_len)
    # tokens whose KV is in the pool once all launched steps are done, without drafts, which count when collected
    num_computed_tokens: int = 0
    num_in_flight: int = 0  # sampled by launched steps, not yet collected
    # The last so many of `token_ids` were appended by the host, and the device does not have them yet.
    num_unsent_tokens: int = 0
    num_reported_tokens: int = 0  # of `token_ids`; only with a mask source
    # For so many tokens, the values that its request asked for have been captured; only with captures.
    num_captured_tokens: int = 0
    waiting_for: WaitingFor | None = None
    # Block ids in the order of positions, one table for each KV-cache group (see `kv_groups`); NULL_BLOCK where the
    # block is behind the group's window. No tables while the sequence has no slot.
    block_tables: list[list[int]] = field(default_factory=list)
    # Up to this many tokens can be computed without asking `KVCache.grow`.
    writable_len: int = 0
    num_unseen_blocks: int = 0  # entries of `block_tables` that are NULL_BLOCK
    # Likewise with host blocks, which have the KV of its computed tokens while it is swapped out.
    host_tables: list[list[int]] = field(default_factory=list)
    # of the first full blocks of `token_ids`, not always of all
    block_hashes: list[bytes] = field(default_factory=list)
    # The first `num_in_history` of `token_ids` as an array with room for more, see `engine.drafts`.
    history: np.ndarray | None = None
    num_in_history: int = 0
    # How many blocks of each table are in the prefix cache, if caching is allowed.
    num_registered_blocks: int = 0
    # Of models with a recurrent state, see `engine.state_cache`: the slot of the cached state with which it begins, and
    # the numbers of tokens after which its state is kept. 0: it begins with zeros.
    state_slot: int = 0
    state_borders: tuple[int, ...] = ()
    # Parts of its KV were computed with different weights, so its blocks do not enter the prefix cache.
    has_mixed_kv: bool = False
    # (weights version, first output token sampled with it), ascending
    weight_starts: list[tuple[int, int]] = field(default_factory=list)
    slot: int = 0  # request slot on the device; 0 (the null slot) while it has none
    finish_reason: FinishReason | None = None
    # the stop id, "repetition_detected", or the error message; otherwise None
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

    def num_lacking_blocks(self, length: int) -> int:
        """How many blocks its tables need to have `length` entries each."""
        return sum(max(length - len(table), 0) for table in self.block_tables)
