"""What a request asks of the sampler: steps skip the parts whose bits no row has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxpage.reasoning import ReasoningConfig
from jaxpage.request import Request
from jaxpage.sampling.constraints import CONSTRAINTS
from jaxpage.sampling.features import (
    ASKED,
    bits,
    features_of,
    processor_bits,
    processors_of,
    slot_fields_of,
)
from jaxpage.sampling.fields import SamplerFeature, SlotField
from jaxpage.sampling.keys import RANDOM
from jaxpage.sampling.logprobs import LOGPROBS, TOP_LOGPROBS
from jaxpage.sampling.penalties import PENALTIES
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling.truncation import TRUNCATION
from jaxpage.sampling_params import SamplingParams
from tests.fakes import FakeMaskSource


@pytest.mark.parametrize(
    ("params", "of_request", "features"),
    [
        ({}, {}, ()),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {}, ()),  # greedy, which resets them
        ({"seed": 3, "stop_token_ids": [7], "logprobs": 0}, {}, (LOGPROBS,)),
        ({"temperature": 0.7}, {}, (RANDOM,)),
        ({"temperature": 1.0, "top_k": 5}, {}, (RANDOM, TRUNCATION)),
        ({"temperature": 1.0, "top_p": 0.9}, {}, (RANDOM, TRUNCATION)),
        ({"temperature": 1.0, "min_p": 0.1}, {}, (RANDOM, TRUNCATION)),
        ({"presence_penalty": 0.5}, {}, (PENALTIES,)),
        ({"frequency_penalty": -0.5}, {}, (PENALTIES,)),
        ({"repetition_penalty": 1.2}, {}, (PENALTIES,)),
        ({"logit_bias": {3: 1.0}}, {}, (CONSTRAINTS,)),
        ({"allowed_token_ids": [3]}, {}, (CONSTRAINTS,)),
        ({"min_tokens": 1}, {}, (CONSTRAINTS,)),
        ({}, {"bad_words_token_ids": ((3,),)}, (CONSTRAINTS,)),
        ({}, {"mask_source": FakeMaskSource()}, (CONSTRAINTS,)),
        ({"logprobs": 2}, {}, (LOGPROBS, TOP_LOGPROBS)),
        ({"logprobs": -1}, {"wants_vocabulary": True}, (LOGPROBS,)),
        ({}, {"wants_vocabulary": True}, (LOGPROBS,)),
    ],
)
def test_a_request_asks_for_the_features_that_its_params_need_and_no_others(
    params, of_request, features
):
    params = SamplingParams(**{"temperature": 0.0} | params)
    request = Request(request_id="0", prompt_token_ids=[5], params=params, seed=0, **of_request)
    assert features_of(request) == bits(*features)


@pytest.mark.parametrize(("budget", "asks"), [(0, True), (-1, False), (None, False)])
def test_thinking_budgets_are_asked_for_where_the_engine_has_them(budget, asks):
    params = SamplingParams(temperature=0.0, thinking_token_budget=budget)
    request = Request(request_id="0", prompt_token_ids=[5], params=params, seed=0)
    assert features_of(request) == 0
    (bit,) = processor_bits((THINKING,))
    assert features_of(request, (THINKING,)) == bit * asks
    assert slot_fields_of(request, 10, (THINKING,))[ASKED] == bit * asks


def test_engines_that_know_no_markers_have_no_thinking_budgets():
    config = SimpleNamespace(reasoning_config=None, logits_processors=())
    assert processors_of(config) == ()
    config.reasoning_config = ReasoningConfig(reasoning_parser="qwen3")
    assert processors_of(config) == (THINKING,)


@pytest.mark.parametrize("given", ["abc", [1.0, 2.0], {"x": 1}])
def test_a_processors_value_that_does_not_fit_its_field_is_refused(given):
    """In a step, it would end the requests beside it."""
    field = SlotField(name="sharpen", dtype="float32", value=lambda r, _: r.params.extra_args["x"])
    processor = SamplerFeature(name="sharpen", fields=(field,), asked=lambda _: True)
    params = SamplingParams(temperature=0.0, extra_args={"x": given})
    request = Request(request_id="0", prompt_token_ids=[5], params=params, seed=0)
    with pytest.raises(ValueError, match=r"field 'sharpen' .* float32 of shape \(\)"):
        slot_fields_of(request, 10, (processor,))
    params.extra_args = {"x": 0.5}
    assert slot_fields_of(request, 10, (processor,))["sharpen"] == 0.5
