"""Names that sampling parameters have elsewhere."""

from __future__ import annotations

import logging

import pytest

from jaxpage import GuidedDecodingParams, SamplingParams, StructuredOutputsParams, param_aliases


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"random_seed": 5}, {"seed": 5}),
        ({"stop_words": ["a"]}, {"stop": ["a"]}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"guided_json": {"type": "null"}}, {"structured_outputs": {"json": {"type": "null"}}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}},
                }
            },
            {"structured_outputs": {"json": {}}},
        ),
        (
            {"response_format": {"type": "regex_schema", "regex_schema": "a"}},
            {"structured_outputs": {"regex": "a"}},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"max_new_tokens": None, "guided_json": None}, {}),
        ({"best_of": 1}, {}),
    ],
)
def test_other_names_mean_the_same(given, same):
    found, wanted = SamplingParams(**given), SamplingParams(**same)
    found.best_of = None
    if wanted.structured_outputs is not None:
        ours, theirs = vars(found.structured_outputs), vars(wanted.structured_outputs)
        assert {k: ours[k] for k in vars(StructuredOutputsParams(regex="a"))} == {
            k: theirs[k] for k in vars(StructuredOutputsParams(regex="a"))
        }
        found.structured_outputs = wanted.structured_outputs
    assert found == wanted


def test_guided_decoding_params():
    guided = GuidedDecodingParams(choice=["a"], backend="xgrammar")
    params = SamplingParams(guided_decoding=guided)
    assert params.structured_outputs is guided
    assert SamplingParams(guided_decoding={"json": "{}", "backend": "outlines"}).structured_outputs


def test_each_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(param_aliases, "_told", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            SamplingParams(max_new_tokens=7, best_of=1)
    assert [r.getMessage() for r in caplog.records] == [
        "max_new_tokens is not a name of jaxpage's own: use max_tokens",
        "best_of is not a name of jaxpage's own: n continuations are computed and returned; leave it out",
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 3, "max_new_tokens": 3}, TypeError, "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, TypeError, "give one of"),
        ({"response_format": {"type": "xml"}}, ValueError, "must have the type text"),
        ({"response_format": {"type": "json_schema"}}, ValueError, "needs {"),
        ({"best_of": 2}, ValueError, "use n=best_of"),
        ({"max_new_token": 3}, TypeError, "max_new_token"),
    ],
)
def test_contradictions(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


def test_a_copy_is_made_of_the_standard_names():
    import copy
    import dataclasses

    params = SamplingParams(max_new_tokens=7, guided_regex="a")
    assert dataclasses.replace(params, n=1) == params == copy.deepcopy(params)
