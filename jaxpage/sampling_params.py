"""What a user asks of one request: vLLM's `SamplingParams`, checked and normalised when built.

Knows names, defaults and ranges. Knows neither vocabulary, model nor engine: whether an id exists
or a text fits is checked where the request is added.
"""

from __future__ import annotations

import enum
import logging
import math
import operator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

MAX_NUM_SEQUENCES = 16384  # of one request; vLLM's VLLM_MAX_N_SEQUENCES
MIN_TEMPERATURE = (
    0.01  # below it float32 logits overflow; raised to it with a warning, as vLLM does
)
GREEDY_TEMPERATURE = 1e-5  # below it the request is greedy


class RequestOutputKind(enum.IntEnum):
    """What a streaming caller gets at each step. `LLM.generate` returns final outputs only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    """How to continue one prompt. Names, defaults and ranges are vLLM's (0.32).

    An engine copies the object when a request is added, so changing it later has no effect on
    running requests. Raises ValueError for values out of range and for options that jaxpage does
    not have; TypeError for unknown names.
    """

    n: int = 1  # continuations per prompt
    presence_penalty: float = 0.0  # [-2, 2], subtracted once for each id in the output
    frequency_penalty: float = 0.0  # [-2, 2], times the count in the output
    repetition_penalty: float = 1.0  # > 0; ids of prompt or output: logits > 0 divided, < 0 times
    temperature: float = 1.0  # [0, 2]; below 1e-5 greedy, which resets top_p, top_k and min_p
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    seed: int | None = None  # any int, used modulo 2**32; None or -1: derived from the engine's
    stop: str | list[str] | None = None  # after construction a list
    stop_token_ids: list[int] | None = None  # after construction a list without duplicates
    ignore_eos: bool = False  # EOS no longer ends a sequence, `stop_token_ids` still do
    max_tokens: int | None = 16  # None: what is left of max_model_len
    min_tokens: int = 0  # until then EOS and stop ids are masked, stop strings ignored
    logprobs: int | None = None  # the k best at each token; the sampled one comes on top; -1: all
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the text of the stop string or stop token
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None  # id -> added to its logit
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None  # after construction a list
    skip_reading_prefix_cache: bool | None = None

    # Known to vLLM, not to jaxpage: any value but the neutral one is refused by `_NOT_SUPPORTED`.
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    extra_args: dict[str, Any] | None = None
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    best_of: int | None = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name, advice in _NOT_SUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValueError(f"{name}={value!r} is not supported; {advice}")
        self._normalise()
        self._check_ranges()
        self._check_strings()
        if self.temperature < GREEDY_TEMPERATURE:
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _normalise(self) -> None:
        """Plain ints, floats and fresh lists, so that a copy shares nothing with its original."""
        for name in ("n", "top_k", "min_tokens"):
            setattr(self, name, _to_int(name, getattr(self, name)))
        for name in ("seed", "max_tokens"):
            if getattr(self, name) is not None:
                setattr(self, name, _to_int(name, getattr(self, name)))
        for name in _FLOATS:
            setattr(self, name, _to_float(name, getattr(self, name)))
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.logprobs is not None:
            is_flag = isinstance(self.logprobs, bool)
            self.logprobs = (
                (1 if self.logprobs else None) if is_flag else _to_int("logprobs", self.logprobs)
            )
        self.stop = _to_strings("stop", self.stop)
        self.bad_words = _to_strings("bad_words", self.bad_words)
        self.stop_token_ids = _to_ids("stop_token_ids", self.stop_token_ids or [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _to_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            # JSON has no integer keys, so ids may come as strings.
            self.logit_bias = {
                _to_int("logit_bias", int(k) if isinstance(k, str) else k): _to_float(
                    "logit_bias", v
                )
                for k, v in self.logit_bias.items()
            }
        self.output_kind = RequestOutputKind(self.output_kind)

    def _check_ranges(self) -> None:
        def check(name: str, ok: bool, range_: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}")

        check("n", 1 <= self.n <= MAX_NUM_SEQUENCES, f"in 1..{MAX_NUM_SEQUENCES}")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        check("repetition_penalty", self.repetition_penalty > 0, "greater than 0")
        check("temperature", 0 <= self.temperature <= 2, "in [0, 2]")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("top_k", self.top_k >= 0, "0 or -1 (off), or at least 1")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 (all)")
        check("allowed_token_ids", self.allowed_token_ids != [], "None or a non-empty list")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}"
            )

    def _check_strings(self) -> None:
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r} is looked for in the text, so it needs detokenize=True; "
                "use stop_token_ids to stop at ids"
            )
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise ValueError(f"{name} must not hold an empty string, got {getattr(self, name)}")


_FLOATS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)

# Field -> what to do instead.
_NOT_SUPPORTED = {
    "prompt_logprobs": "logprobs of prompt tokens are not computed; leave it None",
    "logprob_token_ids": "use logprobs=k for the k most likely ids",
    "flat_logprobs": "logprobs come as one dict per token",
    "stream_interval": "outputs are produced at every step",
    "structured_outputs": "output cannot be constrained by a grammar; see allowed_token_ids",
    "guided_decoding": "output cannot be constrained by a grammar; see allowed_token_ids",
    "thinking_token_budget": "bound the whole output with max_tokens",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "extra_args": "there are no plugin logits processors",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "truncate_prompt_tokens": "shorten prompt_token_ids before the call",
    "best_of": "use n=best_of with logprobs=0 and keep the highest cumulative_logprob",
    "use_beam_search": "call LLM.beam_search, or sample: n with temperature > 0",
}


def _to_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None


def _to_float(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _to_ids(name: str, value: Any) -> list[int]:
    """A list of ints without duplicates, in the order given."""
    if isinstance(value, str | bytes | dict):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return list(dict.fromkeys(_to_int(name, x) for x in value))


def _to_strings(name: str, value: Any) -> list[str]:
    strings: list[Any] = [value] if isinstance(value, str) else list(value or ())
    for s in strings:
        if not isinstance(s, str):
            raise ValueError(f"{name} must hold strings, got {s!r}")
    return strings
