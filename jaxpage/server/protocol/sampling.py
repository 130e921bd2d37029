"""Common to requests of all kinds: sampling fields, and their conversion to `SamplingParams`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxpage.sampling_params import SamplingParams
from jaxpage.server.protocol.lists import ListOf
from jaxpage.structured_outputs.params import (
    StructuredOutputsParams,
    from_response_format,
    to_structured_outputs,
)

logger = logging.getLogger(__name__)

# Fields of `SamplingRequest` that are also fields of `SamplingParams`.
_SAMPLING_FIELDS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "stream_interval", "allowed_token_ids",
    "bad_words", "thinking_token_budget", "repetition_detection", "prompt_logprobs",
)  # fmt: skip
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


# Returned in a header of the answer.
RequestId = Annotated[str, Field(max_length=256, pattern=r"^[!-~]*$")]


class OpenModel(BaseModel):
    """Accepts unknown fields, and logs their names, like vLLM."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def warn_of_unknown(self) -> None:
        """Log which fields have no effect."""
        if self.model_extra:
            logger.warning(
                "fields without effect in a %s: %s",
                type(self).__name__,
                _named(sorted(self.model_extra)),
            )


def _named(names: list[str]) -> str:
    """Names chosen by the client, for the log: on one line, and not too many."""
    shown = [n if n.isidentifier() and len(n) <= 64 else ascii(n[:64]) for n in names[:10]]
    return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


class StreamOptions(OpenModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(OpenModel):
    """Fields of completions, chats, responses and messages. None: the model's default, else vLLM's."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | ListOf[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    stream_interval: int | None = None
    priority: int = 0
    request_id: RequestId | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    vllm_xargs: dict[str, Any] | None = None


class SamplingRequest(SamplingFields):
    """Fields of both completions and chats."""

    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    length_penalty: float | None = None
    use_beam_search: bool = False
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: ListOf[int] | None = None  # with `logprobs`, instead of the best tokens
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None

    def sampling_options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `SamplingParams`: given values, else the defaults. Raises ValueError."""
        self._refuse()
        options = dict(defaults)
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.logit_bias:
            options["logit_bias"] = _to_biases(self.logit_bias)
        structured = self._structured_outputs()
        if structured is not None:
            options["structured_outputs"] = structured
        if self.vllm_xargs:
            options["extra_args"] = self.vllm_xargs
        return options

    def truncation(self) -> dict[str, Any]:
        """Which part of a longer prompt is kept, as `tokenization_kwargs`."""
        return {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }

    def _refuse(self) -> None:
        if self.use_beam_search:
            raise ValueError("use_beam_search is not served; use LLM.beam_search")
        if self.kv_transfer_params:
            raise ValueError("kv_transfer_params are not supported; leave them out")
        options = self.stream_options
        if options is not None and options.model_dump(exclude_unset=True) and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(
                "prompt_logprobs are not available with stream=true; leave one of them out"
            )

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """From any of the fields for it. Raises ValueError if several are given."""
        given = {
            name: value for name in _GUIDED if (value := getattr(self, name, None)) is not None
        }
        found = [
            to_structured_outputs(self.structured_outputs),
            from_response_format(self.response_format),
            *(StructuredOutputsParams(**{_GUIDED[name]: value}) for name, value in given.items()),
        ]
        asked = [params for params in found if params is not None]
        if len(asked) > 1:
            raise ValueError(
                "response_format and structured_outputs both constrain the output; give one of them"
            )
        return asked[0] if asked else None

    def options_of_logprobs(self, num_best: int | None) -> dict[str, Any]:
        """Which logprobs of sampled tokens there are: the best ones, unless any ids are given. Raises ValueError."""
        if not self.logprob_token_ids:
            return {} if num_best is None else {"logprobs": num_best}
        if num_best is None:
            raise ValueError("logprob_token_ids needs logprobs")
        return {"logprob_token_ids": self.logprob_token_ids}


def check_max_tokens(name: str, wanted: int | None, max_model_len: int) -> None:
    """Raise ValueError for more tokens than a sequence may have."""
    if wanted is not None and wanted > max_model_len:
        raise ValueError(
            f"{name}={wanted} cannot be greater than max_model_len={max_model_len}; request fewer tokens"
        )


def _to_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """OpenAI's keys are ids as strings; biases out of its range are clamped, as in vLLM. Raises ValueError."""
    try:
        by_id = {int(key): value for key, value in biases.items()}
    except ValueError:
        raise ValueError(f"logit_bias has keys that are no token ids: {list(biases)[:5]}") from None
    wrong = next((value for value in by_id.values() if value != value), None)
    if wrong is not None:
        raise ValueError("logit_bias has a value that is no number")
    return {token_id: min(100.0, max(-100.0, value)) for token_id, value in by_id.items()}


def make_params(options: Mapping[str, Any]) -> SamplingParams:
    """Raises ValueError, also instead of TypeError for wrong types."""
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise ValueError(str(error)) from None
