"""What a user gets back: vLLM's output types. Plain data; an output does not change while its request continues."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxpage.output_display import to_html, to_table

if TYPE_CHECKING:
    import numpy as np

    from jaxpage.captures import Captured
    from jaxpage.flat_logprobs import FlatLogprobs
    from jaxpage.lora.request import LoRARequest
    from jaxpage.tool_parsers import ToolCall


@dataclass(slots=True)
class Logprob:
    """Log-probability (natural, float32) of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 = the most likely token of the vocabulary
    decoded_token: str | None = None  # None without a tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt. `token_ids` includes the stop token, `text` does not.

    Positional arguments are in vLLM's order.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of `token_ids`; None unless logprobs were asked for
    # one dict per output token: id -> Logprob
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None
    routed_experts: None = None  # in vLLM, like `lora_request`; not filled here
    # "stop", "length", "abort", "repetition"; None while running
    finish_reason: str | None = None
    # stop string or id, or "repetition_detected"; None for EOS and other reasons
    stop_reason: int | str | None = None
    lora_request: None = None
    # (version, start, end) of spans of `token_ids`, in order; the version is how often the parameters had been replaced
    # when these tokens were sampled. In final outputs; None if they never were
    weight_versions: list[tuple[int, int, int]] | None = field(default=None, kw_only=True)
    # by name of the point, in final outputs; only with `SamplingParams.capture`
    captures: Mapping[str, Captured] | None = field(
        default=None, compare=False, repr=False, kw_only=True
    )
    # Parsed from `text` by `LLM.chat`: the text without reasoning and tool calls, and these two.
    content: str | None = field(default=None, kw_only=True)
    reasoning: str | None = field(default=None, kw_only=True)
    tool_calls: list[ToolCall] | None = field(default=None, kw_only=True)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestStateStats:
    """Times of a request. `arrival_time` is seconds since the epoch, `*_ts` are monotonic.

    vLLM has None here unless `disable_log_stats=False`; jaxpage always has them. An event that has not happened yet has
    the time 0.0, as in vLLM. The properties are the names of vLLM 0.x's `RequestMetrics`.
    """

    num_generation_tokens: int = 0  # of all sequences
    max_num_generation_tokens: int = 0  # of the longest of them
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival to the first token

    @property
    def first_scheduled_time(self) -> float:
        return self.scheduled_ts

    @property
    def first_token_time(self) -> float:
        return self.first_token_ts

    @property
    def last_token_time(self) -> float:
        return self.last_token_ts

    @property
    def time_in_queue(self) -> float:
        return max(0.0, self.scheduled_ts - self.queued_ts)


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its continuations, in the order of their index. Positional arguments are in vLLM's order.

    The contents of `outputs` depend on `SamplingParams.output_kind`. CUMULATIVE: all `n` continuations so far. DELTA:
    those that gained tokens or ended, with text, ids and logprobs since the last output. FINAL_ONLY: all, once, when
    the last of them has ended.
    """

    request_id: str
    prompt: str | None  # None if the prompt was given as ids
    prompt_token_ids: list[int]
    # one dict per prompt token: id -> Logprob, None for the first; only if asked for
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    lora_request: LoRARequest | None = None  # the adapter that answered
    encoder_prompt: None = None  # in vLLM, like the next field; always None here
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_cache_creation_tokens: int = 0  # prompt tokens added to the prefix cache
    # float32[rows, ids] for `prompt_logprob_token_ids`; -inf where a row has fewer ids
    prompt_token_id_logprobs: np.ndarray | None = field(default=None, compare=False, kw_only=True)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one, as in vLLM.

        Its completions continue those of the same index if `aggregate` (for DELTA), or else replace them.
        """
        completions = {c.index: c for c in self.outputs}
        for later in next_output.outputs:
            earlier = completions.get(later.index) if aggregate else None
            completions[later.index] = later if earlier is None else _joined(earlier, later)
        self.outputs = list(completions.values())
        self.finished |= next_output.finished
        self.metrics = next_output.metrics

    def df(self) -> Any:
        """A pandas DataFrame: index of the continuation, position, token id, token, logprob and rank of each token.

        Token, logprob and rank are None unless `logprobs` were asked for. Needs pandas.
        """
        return to_table(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    """Two consecutive deltas of a continuation as one."""
    joined = copy.copy(second)
    joined.text = first.text + second.text
    joined.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        logprobs: Any = first.logprobs[:]
        for entries in second.logprobs:
            logprobs.append(entries)
        joined.logprobs = logprobs
    return joined
