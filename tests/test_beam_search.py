"""What a beam search asks and answers: ranges, refusals, and how hypotheses become outputs."""

from __future__ import annotations

import pytest

from jaxpage.beam_search import BeamSearchParams, make_beams, read_output, request_params
from jaxpage.outputs import Logprob
from jaxpage.prompts import Limits
from tests.fakes import make_request

EOS = frozenset([2])
LIMITS = Limits(vocab_size=250, max_model_len=64, max_logprobs=20, has_tokenizer=True)


class Letters:
    """A tokenizer: id i is the letter i, EOS is special."""

    def decode(self, ids, *, skip_special_tokens):
        kept = [i for i in ids if not (skip_special_tokens and i in EOS)]
        return "".join("abcdefgh"[i] for i in kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an int of at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an int of at least 1, got None"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"watermarking": True}, "watermarking=True is not supported"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 2\], got -1.0"),
        ({"early_stopping": "always"}, 'early_stopping must be False, True or "never"'),
        ({"structured_outputs": {}}, "structured_outputs={} is not supported"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | options)


@pytest.mark.parametrize(
    ("params", "mode", "message"),
    [
        (BeamSearchParams(11, 4), "raw", "max_logprobs is 20; .* max_logprobs=22"),
        (BeamSearchParams(200, 4), "raw", "the vocabulary has 250"),
        (BeamSearchParams(2, 4, temperature=0.7), "processed", "logprobs_mode='processed'"),
    ],
)
def test_searches_that_an_engine_cannot_serve_are_refused(params, mode, message):
    with pytest.raises(ValueError, match=message):
        request_params(params, EOS, LIMITS, mode)


def test_rows_are_greedy_with_the_candidates_as_logprobs():
    for mode in ("raw", "temperature", "processed"):
        row = request_params(BeamSearchParams(4, 9, temperature=1.0), EOS, LIMITS, mode)
        assert (row.greedy, row.logprobs, row.max_tokens, row.ignore_eos) == (True, 8, 9, True)
    assert (
        request_params(BeamSearchParams(4, 9), frozenset([2, 3, 5]), LIMITS, "raw").logprobs == 16
    )


@pytest.mark.parametrize("keep_eos_text", [False, True])
def test_hypotheses_become_outputs(keep_eos_text):
    """Two beams from the prompt "gh": "ab" ends by its length, "ac" (c is EOS) by EOS."""
    params = BeamSearchParams(
        2, 2, include_stop_str_in_output=keep_eos_text, skip_special_tokens=False
    )
    request = make_request("r", [6, 7])
    request.beams = make_beams(params, EOS, num_tokens_left=2)
    first = [(0, -0.1), (3, -3.0), (4, -4.0), (5, -5.0)]
    second = [(1, -0.5), (2, -1.0), (3, -3.0), (4, -4.0)]
    request.beams.advance([first])
    request.beams.advance([second, second])
    assert request.beams.done
    longest, ended = read_output(request, params, Letters()).sequences
    assert (longest.tokens, longest.text) == ([6, 7, 0, 1], "ghab")
    assert (longest.finish_reason, longest.stop_reason) == ("length", None)
    assert (ended.tokens, ended.text) == ([6, 7, 0, 2], "ghac" if keep_eos_text else "gha")
    assert (ended.finish_reason, ended.stop_reason) == ("stop", 2)
    assert longest.cum_logprob == -0.6 and ended.cum_logprob == -1.1
    rows = [{i: Logprob(x, rank + 1) for rank, (i, x) in enumerate(r)} for r in (first, second)]
    assert longest.logprobs == rows
    assert read_output(request, params, None).sequences[0].text is None
    assert longest.orig_prompt == {"type": "token", "prompt_token_ids": [6, 7]}
    request.prompt = "gh"
    (again, _) = read_output(request, params, None).sequences
    assert again.orig_prompt["prompt"] == "gh"


def test_a_beam_ends_at_the_engines_longest_sequence():
    assert make_beams(BeamSearchParams(2, 100), EOS, num_tokens_left=7).max_tokens == 7


@pytest.mark.parametrize("length_penalty", [1e300, 300.0, -400.0])
def test_scores_beyond_float_are_refused(length_penalty):
    params = BeamSearchParams(2, 100, length_penalty=length_penalty)
    with pytest.raises(ValueError, match=r"length_penalty=.* 20 tokens .* float"):
        make_beams(params, EOS, num_tokens_left=20)
    assert make_beams(params, EOS, num_tokens_left=1).length_penalty == length_penalty
