"""How a beam search becomes requests, and what a user gets back: vLLM's `BeamSearchOutput`.

Knows names and ranges, how to make a request of them, and how to read its outcome. Must not know the search
(`engine.beams`) or the engine. The search follows transformers' `generate(num_beams=beam_width)` where vLLM's differs:
hypotheses are scored by the length of the answer including EOS, and `early_stopping` says when the search ends.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from jaxpage.engine.beams import Beams, Hypothesis, num_candidates
from jaxpage.outputs import Logprob
from jaxpage.prompts import Limits
from jaxpage.request import Request
from jaxpage.sampling_params import BeamSearchParams, SamplingParams


@dataclass(kw_only=True, slots=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt, `logprobs` do not."""

    orig_prompt: dict[str, Any]  # "type": "token", "prompt_token_ids", and "prompt" if it was text
    tokens: list[int]
    # for each output token the candidates of its beam, best first
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float  # of the output tokens, EOS included; not divided by any length
    text: str | None = None  # None without a tokenizer
    finish_reason: str | None = None  # "stop" (EOS) or "length"
    stop_reason: int | str | None = None  # the EOS id


@dataclass(kw_only=True, slots=True)
class BeamSearchOutput:
    """The `beam_width` best hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def request_params(
    params: BeamSearchParams, eos_token_ids: frozenset[int], limits: Limits, logprobs_mode: str
) -> SamplingParams:
    """The sampling params of each beam. Raises ValueError for a search that the engine does not support."""
    if limits.has_recurrent_state:
        raise ValueError(
            "beam search is not for models with a recurrent state, of which a sequence has only the last one; sample "
            "n answers instead"
        )
    width = params.beam_width
    count = num_candidates(width, len(eos_token_ids))
    if count > limits.vocab_size:
        raise ValueError(
            f"beam_width={width} needs the {count} best tokens of each beam, but the vocabulary "
            f"has {limits.vocab_size}"
        )
    if limits.max_logprobs != -1 and count > limits.max_logprobs:
        raise ValueError(
            f"beam_width={width} with {len(eos_token_ids)} EOS ids needs the {count} best tokens of "
            f"each beam, but max_logprobs is {limits.max_logprobs}; lower beam_width or start the "
            f"engine with max_logprobs={count}"
        )
    if logprobs_mode != "raw" and params.temperature not in (0, 1):
        raise ValueError(
            f"beam search scores raw log-probabilities, so temperature={params.temperature} would "
            f"contradict logprobs_mode={logprobs_mode!r}; use temperature 0 or 1"
        )
    return SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        logprobs=count,
        ignore_eos=True,  # the search looks for it
        detokenize=False,
    )


def make_beams(
    params: BeamSearchParams, eos_token_ids: frozenset[int], num_tokens_left: int
) -> Beams:
    """The search for a prompt with room for `num_tokens_left` more tokens.

    Raises ValueError if the length penalty makes scores overflow.
    """
    max_tokens = min(params.max_tokens, num_tokens_left)
    if abs(params.length_penalty) * math.log(max_tokens) > math.log(sys.float_info.max):
        raise ValueError(
            f"length_penalty={params.length_penalty} is too far from 0: the score of {max_tokens} tokens would be "
            f"divided by {max_tokens} ** {params.length_penalty}, which is beyond the range of a float"
        )
    return Beams(
        params.beam_width,
        max_tokens,
        eos_token_ids=eos_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def read_output(request: Request, params: BeamSearchParams, tokenizer: Any) -> BeamSearchOutput:
    """The hypotheses of a finished request."""
    return BeamSearchOutput(
        sequences=[_sequence(h, request, params, tokenizer) for h in request.beams.ended]
    )


def _sequence(
    hypothesis: Hypothesis, request: Request, params: BeamSearchParams, tokenizer: Any
) -> BeamSearchSequence:
    path = hypothesis.beam.path()
    tokens = [*request.prompt_token_ids, *(beam.token_id for beam in path)]
    text = None
    if tokenizer is not None:
        hides_eos = hypothesis.ended_by_eos and not params.include_stop_str_in_output
        text = tokenizer.decode(
            tokens[:-1] if hides_eos else tokens, skip_special_tokens=params.skip_special_tokens
        )
    return BeamSearchSequence(
        orig_prompt=_original_prompt(request),
        tokens=tokens,
        logprobs=[
            {token_id: Logprob(value, rank) for rank, (token_id, value) in enumerate(row, start=1)}
            for row in (beam.candidates for beam in path)
        ],
        cum_logprob=hypothesis.beam.cum_logprob,
        text=text,
        finish_reason="stop" if hypothesis.ended_by_eos else "length",
        stop_reason=tokens[-1] if hypothesis.ended_by_eos else None,
    )


def _original_prompt(request: Request) -> dict[str, Any]:
    """The prompt as vLLM describes it."""
    optional = {"prompt": request.prompt, "cache_salt": request.cache_salt}
    return {
        "type": "token",
        "prompt_token_ids": list(request.prompt_token_ids),
        **{name: value for name, value in optional.items() if value is not None},
    }
