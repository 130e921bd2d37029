"""Names, defaults, ranges and normalisation of SamplingParams."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest

from jaxpage import RequestOutputKind, SamplingParams
from jaxpage.sampling_params import RepetitionDetectionParams
from jaxpage.structured_outputs import StructuredOutputsParams

VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "logit_bias": None,
    "allowed_token_ids": None,
    "thinking_token_budget": None,
    "stream_interval": None,
    "repetition_detection": None,
    "skip_reading_prefix_cache": None,
}


# Of vLLM 0.32, besides those above.
VLLM_FIELDS = (
    *VLLM_DEFAULTS,
    *("watermarking", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("logprob_token_ids", "flat_logprobs", "structured_outputs", "extra_args"),
    *("skip_clone", "routed_experts_prompt_start"),
    "trace_decode_token_ids",
)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 16384], [0, -1, 16385, 1.5, True, "2"]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan, "1"]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [1e-37, 5, 3e38], [0, -1, 1e-39, 1e39, math.inf, math.nan, 10**400]),
        ("temperature", [0, 2], [-0.1, 2.1, math.nan, None]),
        ("top_p", [0.01, 1], [0, 1.01, -1]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.5, True]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("max_tokens", [None, 1], [0, -1, 2.5]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("logprobs", [None, -1, 0, 20, True, False], [-2, 0.5]),
        (
            "repetition_detection",
            [None, {}, {"max_pattern_size": 3, "min_count": 2}, RepetitionDetectionParams(5, 5, 9)],
            [
                {"max_pattern_size": 3},
                {"max_pattern_size": 3, "min_count": 1},
                {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
                {"max_pattern_size": -1, "min_count": 2},
                {"max_pattern_size": 1.5, "min_count": 2},
                {"size": 3},
                3,
            ],
        ),
        ("allowed_token_ids", [None, [0]], [[], "12", ["1"], [1.0], 5]),
        ("stop_token_ids", [None, [], [7]], ["7", [True], 5]),
        (
            "logit_bias",
            [None, {}, {3: -100}, {"3": 5}, {3: -math.inf}],
            [{3: math.nan}, {3: math.inf}, {3: 1e39}, {3: "1"}, {"x": 1}, {1.5: 1}, [1, 2]],
        ),
        ("stop", [None, "a", ["a", "b"]], ["", ["a", ""], [1], 5]),
        ("bad_words", [None, ["a"]], [[""], [1], 5]),
        ("output_kind", [0, 1, 2, RequestOutputKind.DELTA], [3, 9, "x"]),
        ("ignore_eos", [True, False, np.True_, 0], ["no", "", None, 2]),
        ("detokenize", [True], ["yes"]),
        ("skip_reading_prefix_cache", [None, True], ["no"]),
        ("extra_args", [None, {}, {"a": 1}], ["a", 3]),
        ("stream_interval", [None, 1, 100], [0, -1, 1.5, True]),
        ("thinking_token_budget", [None, -1, 0, 5, 2**40], [-2, True, 1.5, "3"]),
        ("prompt_logprobs", [None, False, 0, 3, -1, True], [-2, 0.5, "3"]),
        ("logprob_token_ids", [None, [], [5], [5, 5, 6], range(128)], [range(129), ["a"], 5]),
        (
            "prompt_logprob_token_ids",
            [None, [[1, 2], [3, -1]], [[1], [2, 3]], np.ones((2, 2), int)],
            [5, [1], "a", [], [[]], [[], []]],
        ),
        ("flat_logprobs", [True, False], ["yes", None]),
        ("truncate_prompt_tokens", [None, -1, 1, 9], [0, -2, 1.5]),
        (
            "structured_outputs",
            [None, {"json": "{}"}, {"regex": "a+"}, StructuredOutputsParams(choice=["a"])],
            [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"xml": "a"}, "a", {"regex": 5}],
        ),
    ],
)
def test_ranges_include_their_ends_and_nothing_beyond(name, good, bad):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"bad_words": 5}, "bad_words must be a string or a list of strings, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, got 5"),
        ({"logit_bias": [1, 2]}, r"logit_bias must be a dict of token id to number, got \[1, 2\]"),
        ({"logit_bias": {"a": 1}}, "a key of logit_bias must be a token id, got 'a'"),
        ({"logit_bias": {3: 1e39}}, r"logit_bias\[3\] must fit into float32, got 1e\+39"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] must be a finite number, got inf"),
        ({"repetition_penalty": 1e39}, r"greater than 0 and fit into float32, .*, got 1e\+39"),
        ({"output_kind": 9}, r"one of 0 \(CUMULATIVE\), 1 \(DELTA\), 2 \(FINAL_ONLY\), got 9"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    ],
)
def test_a_refusal_names_the_field_and_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_a_bias_of_minus_infinity_bans_a_token():
    assert SamplingParams(logit_bias={"7": -math.inf}).logit_bias == {7: -math.inf}


def test_optional_fields_of_an_openai_request():
    params = SamplingParams.from_optional(
        temperature=None, top_p=None, n=None, max_tokens=None, logit_bias={"5": 300, "6": -1e6}
    )
    assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1.0, 1.0, 1, None)
    assert params.logit_bias == {5: 100.0, 6: -100.0}


def test_every_field_of_vllm_is_known():
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(VLLM_FIELDS) <= names


def test_the_first_parameters_may_be_given_in_vllm_s_order():
    given = (2, 0.1, 0.2, 1.5, 0.8, None, 0.9, 7, 0.1, 3, ["x"], [5], True, 9, 1, 4)
    names = (
        "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed "
        "stop stop_token_ids ignore_eos max_tokens min_tokens logprobs"
    ).split()
    named = dict(zip(names, given, strict=True))
    assert SamplingParams(*given) == SamplingParams(**named)
    assert SamplingParams(2, max_new_tokens=9) == SamplingParams(n=2, max_tokens=9)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(*given, True)


def test_other_spellings_of_a_value_are_made_one():
    params = SamplingParams(
        stop="x",
        stop_token_ids=[5, 3, 5],
        seed=-1,
        top_k=-1,
        thinking_token_budget=-1,
        logprobs=True,
        logit_bias={"7": 1},
        output_kind=2,
    )
    assert params.stop == ["x"]
    assert params.stop_token_ids == [5, 3]
    assert (params.seed, params.top_k, params.logprobs) == (None, 0, 1)
    assert params.thinking_token_budget is None
    assert params.logit_bias == {7: 1.0}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert SamplingParams(logprobs=False).logprobs is None


def test_no_given_ids_ask_for_no_logprobs():
    assert not SamplingParams(logprob_token_ids=[]).wants_logprobs
    assert SamplingParams(logprob_token_ids=[], logprobs=0).wants_logprobs
    with pytest.raises(ValueError, match="logprob_token_ids has 0 ids"):
        SamplingParams(logprob_token_ids=[], logprobs=2)


def test_where_given_ids_of_a_prompt_begin():
    SamplingParams(prompt_logprob_token_ids=[[1]], prompt_logprob_start=7)
    for start in (-1, 0.5):
        with pytest.raises(ValueError, match="prompt_logprob_start"):
            SamplingParams(prompt_logprob_token_ids=[[1]], prompt_logprob_start=start)
    with pytest.raises(ValueError, match="prompt_logprob_start=7 needs prompt_logprob_token_ids"):
        SamplingParams(prompt_logprob_start=7)


def test_a_temperature_of_zero_is_greedy():
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert greedy.greedy
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0, 1, 0, 0)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxpage"):
        assert SamplingParams(temperature=0.005).temperature == 0.01
    assert "0.005" in caplog.text
    tiny = SamplingParams(temperature=1e-9, n=2)
    assert not tiny.greedy and tiny.temperature == 0.01


def test_greedy_sampling_of_several_continuations_is_refused():
    with pytest.raises(ValueError, match="n=2"):
        SamplingParams(n=2, temperature=0)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"best_of": 3}, "n=best_of"),
        ({"use_beam_search": True}, "temperature > 0"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "leave logprobs None"),
        ({"watermarking": True}, "leave it None"),
        ({"logits_processors": [abs]}, "logit_bias"),
    ],
)
def test_what_is_not_supported_says_what_to_use_instead(options, advice):
    with pytest.raises(ValueError, match=advice):
        SamplingParams(**options)


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_a_copy_is_equal_and_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, stop_token_ids=[3], bad_words=["b"])
    for copy in (dataclasses.replace(params), params.clone()):
        _check_copy(params, copy)


def _check_copy(params, copy):
    assert copy == params
    copy.stop.append("x")
    copy.stop_token_ids.append(1)
    copy.logit_bias[9] = 1.0
    copy.bad_words.append("y")
    assert (params.stop, params.stop_token_ids) == (["a"], [3])
    assert (params.logit_bias, params.bad_words) == ({1: 2.0}, ["b"])
