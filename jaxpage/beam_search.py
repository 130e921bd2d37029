"""What a user asks of a beam search and gets back: vLLM's `BeamSearchParams` and `BeamSearchOutput`.

Knows names, ranges, and how they become a request and are read off it. Knows neither the search (`engine.beams`) nor
the engine. The search is transformers' `generate(num_beams=beam_width)`, where vLLM's differs: hypotheses are scored by
the length of the answer, its EOS included, and `early_stopping` says when it is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxpage.engine.beams import Beams, Hypothesis, num_candidates
from jaxpage.outputs import Logprob
from jaxpage.prompts import Limits
from jaxpage.request import Request
from jaxpage.sampling_params import SamplingParams


@dataclass
class BeamSearchParams:
    """How to search. Names and defaults are vLLM's (0.32), `early_stopping` is transformers'.

    Raises ValueError for values out of range and for options that jaxpage does not have.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False  # EOS no longer ends a beam
    # Nothing is drawn, and scores are log-softmax of the raw logits, so it has no effect, as in vLLM. Where the
    # engine's logprobs are asked to follow the temperature, only 0 and 1 are accepted.
    temperature: float = 0.0
    length_penalty: float = (
        1.0  # score = cum_logprob / tokens ** length_penalty; > 0 favours length
    )
    include_stop_str_in_output: bool = False  # keep the text of EOS; its id is in `tokens` anyway
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    early_stopping: bool | str = False  # or "never"; see `engine.beams.Beams`

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty!r}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f'early_stopping must be False, True or "never", got {self.early_stopping!r}'
            )
        if self.structured_outputs is not None:
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r} is not supported; output cannot "
                "be constrained by a grammar"
            )


@dataclass(kw_only=True, slots=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt, `logprobs` do not."""

    tokens: list[int]
    logprobs: list[
        dict[int, Logprob]
    ]  # for each output token the candidates of its beam, best first
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
    """What each beam's rows ask of the engine. Raises ValueError for a search that it cannot serve."""
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
    """The search for a prompt that has room for so many more tokens."""
    return Beams(
        params.beam_width,
        min(params.max_tokens, num_tokens_left),
        eos_token_ids=eos_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def read_output(request: Request, params: BeamSearchParams, tokenizer: Any) -> BeamSearchOutput:
    """The hypotheses of a finished request."""
    prompt = request.prompt_token_ids
    return BeamSearchOutput(
        sequences=[_sequence(h, prompt, params, tokenizer) for h in request.beams.ended]
    )


def _sequence(
    hypothesis: Hypothesis, prompt: list[int], params: BeamSearchParams, tokenizer: Any
) -> BeamSearchSequence:
    path = hypothesis.beam.path()
    tokens = [*prompt, *(beam.token_id for beam in path)]
    text = None
    if tokenizer is not None:
        hides_eos = hypothesis.ended_by_eos and not params.include_stop_str_in_output
        text = tokenizer.decode(
            tokens[:-1] if hides_eos else tokens, skip_special_tokens=params.skip_special_tokens
        )
    return BeamSearchSequence(
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
