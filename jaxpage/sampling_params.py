"""The parameters of one request: vLLM's `SamplingParams` and `BeamSearchParams`, checked at construction.

Knows names, defaults and ranges. Must not know vocabulary, model or engine: whether an id exists or a text fits is
checked when the request is added.
"""

from __future__ import annotations

import copy
import enum
import logging
import numbers
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from jaxpage.captures import Capture, to_captures
from jaxpage.interventions import Intervention, to_interventions
from jaxpage.param_aliases import accept_aliases, tell
from jaxpage.param_values import (
    MAX_FLOAT32,
    MIN_FLOAT32,
    if_given,
    to_biases,
    to_bool,
    to_count,
    to_float,
    to_ids,
    to_int,
    to_rows,
    to_strings,
)
from jaxpage.repetition import RepetitionDetectionParams, to_repetition_detection
from jaxpage.structured_outputs.params import StructuredOutputsParams, to_structured_outputs

logger = logging.getLogger(__name__)

MAX_NUM_SEQUENCES = 16384  # of one request; vLLM's VLLM_MAX_N_SEQUENCES
# below it float32 logits overflow; smaller values above 0 are raised to it with a warning, as in vLLM
MIN_TEMPERATURE = 0.01
MAX_LOGPROB_TOKEN_IDS = 128  # of one request


class RequestOutputKind(enum.IntEnum):
    """What a streaming caller gets at each step. `LLM.generate` returns final outputs only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@accept_aliases
@dataclass
class SamplingParams:
    """How to continue one prompt. Names, defaults and ranges are vLLM's (0.32).

    Names of older vLLM and of LMDeploy are accepted where they mean the same, see `param_aliases`. An engine copies the
    object when a request is added, so later changes do not affect running requests. Raises ValueError for values out of
    range and for unsupported options, TypeError for unknown names.
    """

    n: int = 1  # continuations per prompt
    presence_penalty: float = 0.0  # [-2, 2], subtracted once for each id in the output
    frequency_penalty: float = 0.0  # [-2, 2], subtracted once per occurrence in the output
    repetition_penalty: float = 1.0  # > 0; divides logits > 0, multiplies < 0, of ids seen so far
    temperature: float = 1.0  # [0, 2]; 0: greedy, which resets top_p, top_k and min_p
    watermarking: bool | None = None  # not supported: None or False; here for vLLM's order
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    seed: int | None = None  # any int, used modulo 2**32; None or -1: derived from the engine's
    stop: str | list[str] | None = None  # a list after construction
    stop_token_ids: list[int] | None = None  # a list without duplicates after construction
    ignore_eos: bool = False  # EOS no longer ends a sequence, `stop_token_ids` still do
    max_tokens: int | None = 16  # None: what is left of max_model_len
    min_tokens: int = 0  # until then EOS and stop ids are masked, stop strings ignored
    logprobs: int | None = None  # the k best at each token, and the sampled one; -1: all
    _: KW_ONLY  # up to here in vLLM's order
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the text of the stop string or stop token
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # tokens of a sequence between two outputs; the first and the last are not delayed
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None  # id -> added to its logit; -inf bans the id
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None  # a list after construction
    # reasoning tokens until the end of reasoning is forced; None or -1: unlimited
    thinking_token_budget: int | None = None
    # or a dict of its fields; after construction None if detection is off
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    # what the output must match; or a dict of its fields. EOS ends a complete output, even with `ignore_eos`
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None  # keep only the last so many; -1: as many as fit
    # changes inside the model, applied in this order; see `jaxpage.research`. A tuple after construction
    interventions: list[Intervention] | tuple[Intervention, ...] | None = None
    # values inside the model, or names of points, to return in `CompletionOutput.captures`. Likewise a tuple
    capture: list[Capture | str] | tuple[Capture, ...] | Capture | str | None = None
    extra_args: dict[str, Any] | None = None  # for custom logits processors

    logprob_token_ids: list[int] | None = None  # return logprobs of these ids, instead of the best
    # the k best in place of each prompt token, and that token; -1: all. No cached KV is read
    prompt_logprobs: int | None = None
    # row i: ids to score after prompt token `prompt_logprob_start` + i; -1: none. One row for each prompt token from
    # there except the last; the scores are in `RequestOutput.prompt_token_id_logprobs`
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False  # as `FlatLogprobs` instead of lists of dicts

    # Options of vLLM that jaxpage lacks: only neutral values are accepted, see `_NOT_SUPPORTED`.
    logits_processors: Any = None
    best_of: int | None = None
    use_beam_search: bool = False
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0
    skip_clone: bool = False  # no effect: params are always copied

    def __post_init__(self) -> None:
        for name, advice in _NOT_SUPPORTED.items():
            value, neutral = getattr(self, name), _NEUTRAL.get(name)
            if name == "best_of" and value == self.n:
                tell("best_of", "n continuations are computed and returned; leave it out")
            elif not (
                value is None or value is False or (neutral is not None and value == neutral)
            ):
                raise ValueError(f"{name}={value!r} is not supported; {advice}")
        self._normalise()
        self._check_ranges()
        self._check_strings()
        self.logprob_token_ids = self.logprob_token_ids or None
        if self.temperature == 0:
            if self.n > 1:
                raise ValueError(
                    f"n must be 1 with greedy sampling, got n={self.n}: all continuations would "
                    "be the same; set temperature > 0"
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is below %g, where logits overflow; %g is used",
                self.temperature,
                MIN_TEMPERATURE,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """The params of an OpenAI request: None means the default, biases are cut to [-100, 100]."""
        given: dict[str, Any] = {
            name: value
            for name, value in options.items()
            if value is not None or name not in _NEVER_NONE
        }
        params = cls(**given)
        if params.logit_bias:
            params.logit_bias = {
                token_id: min(100.0, max(-100.0, bias))
                for token_id, bias in params.logit_bias.items()
            }
        return params

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def all_stop_token_ids(self) -> set[int]:
        """`stop_token_ids` as a set. The model's EOS ids, which vLLM adds when a request begins, are not in it."""
        return set(self.stop_token_ids or ())

    @property
    def wants_logprobs(self) -> bool:
        """Whether outputs have logprobs."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def _normalise(self) -> None:
        """Convert to plain ints, floats and new lists, so that a copy shares nothing with its original."""
        for name, convert in _CONVERTED.items():
            setattr(self, name, convert(name, getattr(self, name)))
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.top_k == -1:
            self.top_k = 0
        self.stop_token_ids = self.stop_token_ids or []
        self.repetition_detection = to_repetition_detection(self.repetition_detection)
        self.structured_outputs = to_structured_outputs(self.structured_outputs)
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ValueError(f"extra_args must be a dict or None, got {self.extra_args!r}")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(f"{kind.value} ({kind.name})" for kind in RequestOutputKind)
            raise ValueError(
                f"output_kind must be one of {kinds}, got {self.output_kind!r}"
            ) from None

    def _check_ranges(self) -> None:
        def check(name: str, ok: bool, range_: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}")

        check("n", 1 <= self.n <= MAX_NUM_SEQUENCES, f"in 1..{MAX_NUM_SEQUENCES}")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        # Outside of it float32 rounds to 0 or inf on the device.
        check(
            "repetition_penalty",
            MIN_FLOAT32 <= self.repetition_penalty <= MAX_FLOAT32,
            f"greater than 0 and fit into float32, {MIN_FLOAT32} to {MAX_FLOAT32}",
        )
        check("temperature", 0 <= self.temperature <= 2, "in [0, 2]")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("top_k", self.top_k >= 0, "0 or -1 (off), or at least 1")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        interval = self.stream_interval
        check("stream_interval", interval is None or interval >= 1, "at least 1, or None")
        budget = self.thinking_token_budget
        length = self.truncate_prompt_tokens
        check(
            "truncate_prompt_tokens",
            length is None or length >= 1 or length == -1,
            "at least 1, or -1",
        )
        check("thinking_token_budget", budget is None or budget >= 0, "at least 0, or -1 (none)")
        check("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 (all)")
        check(
            "prompt_logprobs",
            self.prompt_logprobs is None or self.prompt_logprobs >= -1,
            "at least 0, or -1 (all)",
        )
        self._check_logprob_ids()
        self._check_prompt_logprob_ids()
        check("allowed_token_ids", self.allowed_token_ids != [], "None or a non-empty list")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}"
            )

    def _check_logprob_ids(self) -> None:
        ids = self.logprob_token_ids
        if ids is not None and len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(
                f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} different ids, got {len(ids)}"
            )
        if ids is not None and self.logprobs not in (None, len(ids)):
            raise ValueError(
                f"logprob_token_ids has {len(ids)} ids, which come instead of the {self.logprobs} best that "
                "logprobs asks for; leave logprobs None"
            )

    def _check_prompt_logprob_ids(self) -> None:
        rows, start = self.prompt_logprob_token_ids, self.prompt_logprob_start
        if rows is not None and not any(rows):
            raise ValueError(f"prompt_logprob_token_ids must have ids, got {rows}")
        if start is not None and rows is None:
            raise ValueError(f"prompt_logprob_start={start} needs prompt_logprob_token_ids")
        if start is not None and start < 0:
            raise ValueError(f"prompt_logprob_start must be at least 0, or None, got {start}")

    def _check_strings(self) -> None:
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r} is looked for in the text, so it needs detokenize=True; "
                "use stop_token_ids to stop at ids"
            )
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise ValueError(f"{name} must not hold an empty string, got {getattr(self, name)}")


@dataclass
class BeamSearchParams:
    """Parameters of a beam search. Names and defaults are vLLM's (0.32); `early_stopping` is transformers'.

    Raises ValueError for values out of range and for unsupported options.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False  # EOS no longer ends a beam
    # No effect, as in vLLM: nothing is sampled, and scores are log-softmax of the raw logits. If the engine's logprobs
    # follow the temperature (`logprobs_mode`), only 0 and 1 are accepted.
    temperature: float = 0.0
    # score = cum_logprob / tokens ** length_penalty; > 0 favours length
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the text of EOS; its id is in `tokens` anyway
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    early_stopping: bool | str = False  # or "never"; see `engine.beams.Beams`
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            setattr(self, name, to_bool(name, getattr(self, name)))
        self.length_penalty = to_float("length_penalty", self.length_penalty)
        self.temperature = to_float("temperature", self.temperature)
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f'early_stopping must be False, True or "never", got {self.early_stopping!r}'
            )
        if self.structured_outputs is not None:
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r:.200} is not supported: a grammar would forbid what "
                "beams are ranked by; use LLM.generate with n > 1"
            )
        if self.watermarking:
            raise ValueError("watermarking=True is not supported; leave it None")


_FLOATS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)

_BOOLS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
# Fields for which None means the default in an OpenAI request.
_NEVER_NONE = ("n", "top_k", *_FLOATS, *_BOOLS, "min_tokens", "output_kind")

# Field -> the function that converts its value.
_CONVERTED: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_BOOLS, to_bool),
    **dict.fromkeys(_FLOATS, to_float),
    **dict.fromkeys(("n", "top_k", "min_tokens"), to_int),
    **dict.fromkeys(
        ("seed", "max_tokens", "stream_interval", "thinking_token_budget"), if_given(to_int)
    ),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprob_start"), if_given(to_int)),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), to_count),
    **dict.fromkeys(("stop", "bad_words"), to_strings),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), if_given(to_ids)),
    "skip_reading_prefix_cache": if_given(to_bool),
    "prompt_logprob_token_ids": if_given(to_rows),
    "logit_bias": if_given(to_biases),
    "interventions": if_given(to_interventions),
    "capture": if_given(to_captures),
}

# Field -> what to do instead.
_NOT_SUPPORTED = {
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "best_of": "use n=best_of with logprobs=0 and keep the highest cumulative_logprob",
    "use_beam_search": "call LLM.beam_search, or sample: n with temperature > 0",
    "watermarking": "outputs carry no watermark; leave it None",
    "trace_decode_token_ids": "give the tokens as part of the prompt",
    "routed_experts_prompt_start": "which experts served a token is not returned; leave it 0",
}
# Neutral values besides None and False.
_NEUTRAL: dict[str, Any] = {
    "routed_experts_prompt_start": 0,
}
