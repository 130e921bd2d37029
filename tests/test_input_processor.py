"""Prompts and params become requests, without any engine."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jaxpage import LoRARequest, tiny
from jaxpage.adapter_cache import AdapterCache
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.input_processor import InputProcessor, derive_seed
from jaxpage.reasoning import has_markers
from jaxpage.sampling.features import features_of
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Input processors of an engine that is not there; `taken` are the ids in use."""
    folder = str(tiny.build(tmp_path_factory.mktemp("inputs") / "tiny"))
    tokenizer, hf_config = load_tokenizer(folder), load_hf_config(folder)

    def make(*, taken=(), default_sampling=None, **options) -> InputProcessor:
        config = EngineConfig(model=folder, max_model_len=64, **options)
        built = SimpleNamespace(
            config=config.resolve(hf_config, platform="cpu"),
            tokenizer=None if config.skip_tokenizer_init else tokenizer,
            vocab_size=512,
            eos_token_ids=(2, 7),
            default_sampling=default_sampling or {},
            has_recurrent_state=False,
            picture_processor=None,
            adapters=None,
            research=None,
        )
        return InputProcessor(built, ids_in_use=taken)

    return make


def test_requests_are_named_and_seeded_by_their_number(make):
    inputs = make(seed=3, taken={"1", "_1", "4"})
    params = [SamplingParams(), SamplingParams(seed=2**32 + 5), SamplingParams()]
    requests = inputs.requests(inputs.parse([[5], [6], [7]]), params)
    assert [r.request_id for r in requests] == ["0", "__1", "2"]
    assert [r.seed for r in requests] == [derive_seed(3, 0), 5, derive_seed(3, 2)]
    named = inputs.request("mine", inputs.parse("the"), SamplingParams())
    assert (named.request_id, named.seed, named.prompt) == ("mine", derive_seed(3, 3), "the")
    with pytest.raises(ValueError, match="'4' is in use"):
        inputs.request("4", inputs.parse("the"), SamplingParams())
    with pytest.raises(ValueError, match="one prompt at a time, with at least one token; got 2"):
        inputs.request("other", inputs.parse(["the", "a"]), SamplingParams())


def test_prompts_are_truncated_where_tokenization_kwargs_say_so(make):
    inputs = make()
    (whole,) = inputs.parse("Once upon a time")
    for length, expected in ((2, whole.token_ids[-2:]), (-1, whole.token_ids)):
        options = {"truncate_prompt_tokens": length}
        text, ids = inputs.parse(
            ["Once upon a time", {"prompt_token_ids": whole.token_ids}], options
        )
        assert text.token_ids == ids.token_ids == expected
        assert options == {"truncate_prompt_tokens": length}
    messages = [{"role": "user", "content": "Once upon a time"}]
    (chat,) = inputs.parse_chat(messages)
    (short,) = inputs.parse_chat(messages, tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert short.token_ids == chat.token_ids[-3:]
    for length in (0, -2, 65, 1.5):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            inputs.parse("Once", {"truncate_prompt_tokens": length})


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_length": 3}, slice(None)),
        ({"truncation": False, "max_length": 3}, slice(None)),
        ({"truncation": True, "max_length": 3}, slice(-3, None)),
        ({"truncation": "longest_first", "max_length": 3}, slice(-3, None)),
        ({"truncation": True, "max_length": 3, "truncation_side": "right"}, slice(3)),
        ({"truncation": "do_not_truncate", "truncate_prompt_tokens": 3}, slice(None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        (
            {"truncate_prompt_tokens": 3, "truncation_side": "left", "padding": False},
            slice(-3, None),
        ),
        ({"truncate_prompt_tokens": 3, "truncation_side": None, "padding": None}, slice(-3, None)),
        ({"truncation_side": "right"}, slice(None)),
    ],
)
def test_prompts_are_truncated_as_by_vllm(make, options, kept):
    inputs = make()
    (whole,) = inputs.parse("Once upon a time there was")
    assert len(whole.token_ids) > 4
    for prompt in ("Once upon a time there was", {"prompt_token_ids": whole.token_ids}):
        (found,) = inputs.parse(prompt, options)
        assert found.token_ids == whole.token_ids[kept]
    messages = [{"role": "user", "content": "Once upon a time"}]
    (chat,) = inputs.parse_chat(messages)
    (short,) = inputs.parse_chat(messages, tokenization_kwargs=options)
    assert short.token_ids == chat.token_ids[kept]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [0, -2, -1]),
        ({"truncation": True, "max_length": 3}, [0, -2, -1]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [-3, -2, -1]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, [-3, -2, -1]),
    ],
)
def test_a_truncated_text_keeps_its_bos_unless_a_side_is_named(make, options, kept):
    """As in vLLM: for a named side it cuts what the tokenizer made of the whole text."""
    inputs = make()
    inputs.tokenizer = copy.deepcopy(inputs.tokenizer)
    bos = inputs.tokenizer.convert_ids_to_tokens(1)
    inputs.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 1)]
    )
    text = "Once upon a time there was"
    (whole,) = inputs.parse(text, {"add_special_tokens": options.get("add_special_tokens")})
    (short,) = inputs.parse(text, options)
    assert short.token_ids == [whole.token_ids[i] for i in kept]
    (ids,) = inputs.parse([whole.token_ids], options)
    assert (
        ids.token_ids
        == whole.token_ids[
            slice(3) if options.get("truncation_side") == "right" else slice(-3, None)
        ]
    )
    (all_that_fits,) = inputs.parse(text * 40, {"truncate_prompt_tokens": -1})
    assert len(all_that_fits.token_ids) == 63 and all_that_fits.token_ids[0] == 1


def test_truncation_without_a_length_leaves_room_for_an_answer(make):
    (prompt,) = make().parse([5] * 100, {"truncation": True})
    assert len(prompt.token_ids) == 63


def test_a_length_that_is_too_large_is_named_as_the_caller_may_have_written_it(make):
    for options in ({"truncation": True, "max_length": 65}, {"truncate_prompt_tokens": 65}):
        with pytest.raises(ValueError, match="or max_length.* 65 is more than max_model_len=64"):
            make().parse("Once", options)


def test_what_is_refused_does_not_count(make):
    inputs = make()
    with pytest.raises(ValueError, match="prompt 1 of 2: prompt_token_ids has 600"):
        inputs.requests(inputs.parse([[5], [600]]))
    (request,) = inputs.requests(inputs.parse([5]))
    assert request.request_id == "0"


def test_eos_ids_end_a_request_unless_they_are_ignored(make):
    inputs = make()
    usual, ignoring = inputs.requests(
        inputs.parse([[5], [5]]),
        [SamplingParams(stop_token_ids=[9]), SamplingParams(stop_token_ids=[9], ignore_eos=True)],
    )
    assert (usual.stop_token_ids, usual.eos_token_ids) == ({2, 7, 9}, {2})
    assert (ignoring.stop_token_ids, ignoring.eos_token_ids) == ({9}, frozenset())
    # min_tokens masks them either way.
    assert usual.all_eos_token_ids == ignoring.all_eos_token_ids == {2, 7}


def test_a_request_says_what_the_device_must_know(make):
    inputs = make()
    (request,) = inputs.requests(inputs.parse([5, 6]), SamplingParams(temperature=0.5, top_k=3))
    assert request.features == features_of(request) != 0
    assert request.slot_fields["top_k"] == 3
    assert request.params.max_tokens == 16


def test_params_are_copied_and_completed(make):
    inputs, params = make(default_sampling={"top_p": 0.5}), SamplingParams(max_tokens=None)
    (request,) = inputs.requests(inputs.parse([5, 6, 7]), params)
    assert request.params is not params
    assert (request.params.max_tokens, params.max_tokens) == (61, None)
    (request,) = inputs.requests(inputs.parse([5]))
    assert request.params.top_p == 0.5


BUDGET = SamplingParams(thinking_token_budget=5)


def test_a_thinking_budget_comes_with_the_markers_as_ids(make):
    def ids(text: str) -> tuple[int, ...]:
        return tuple(make().tokenizer.encode(text, add_special_tokens=False))

    own = {"reasoning_start_str": "the", "reasoning_end_str": "so, a dog."}
    for config, markers in (
        (own, ("the", "so, a dog.", "so, a dog.")),
        ({"reasoning_parser": "qwen3"}, ("<think>", "</think>", "</think>")),
        ({"reasoning_parser": "deepseek_r1"} | own, ("the", "</think>", "so, a dog.")),
    ):
        inputs = make(reasoning_config=config)
        request, without = inputs.requests(inputs.parse([[5], [6]]), [BUDGET, SamplingParams()])
        found = request.reasoning
        assert (found.start, found.end, found.forced_end) == tuple(map(ids, markers))
        assert (
            request.features
            == features_of(request, (THINKING,))
            != features_of(without, (THINKING,))
        )
        assert without.reasoning is None and without.slot_fields.get("thinking_budget") is None
        assert request.slot_fields["thinking_budget"] == 5
        assert tuple(request.slot_fields["think_start"][: len(found.start) + 1]) == (
            *found.start,
            -1,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs to know what begins and ends reasoning"),
        ({"reasoning_start_str": "the"}, "needs to know what begins and ends reasoning"),
        ({"reasoning_parser": "gpt_oss"}, "reasoning_parser='gpt_oss' are not known"),
        ({"reasoning_parser": "qwen3", "reasoning_end_str": "€" * 40}, "must have 1 to 64"),
    ],
)
def test_a_thinking_budget_without_usable_markers_is_refused(make, options, message):
    inputs = make(reasoning_config=options)
    assert len(inputs.requests(inputs.parse([5]))) == 1
    with pytest.raises(ValueError, match=message):
        inputs.requests(inputs.parse([5]), BUDGET)
    inputs = make(reasoning_config={"reasoning_parser": "qwen3"}, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="thinking_token_budget needs a tokenizer"):
        inputs.requests(inputs.parse([5]), BUDGET)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        (None, False),
        ({"reasoning_start_str": "the"}, False),
        ({"reasoning_parser": "gpt_oss"}, False),
        ({"reasoning_parser": "qwen3"}, True),
        ({"reasoning_start_str": "the", "reasoning_end_str": "so"}, True),
    ],
)
def test_whether_reasoning_can_be_limited_is_known_before(options, known):
    assert has_markers(options) is known


def test_each_prompt_has_a_priority_and_bad_words_need_a_tokenizer(make):
    inputs = make(scheduling_policy="priority", skip_tokenizer_init=True)
    requests = inputs.requests(inputs.parse([[5], [6]]), priority=[3, 1])
    assert [r.priority for r in requests] == [3, 1]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        inputs.requests(inputs.parse([5]), SamplingParams(bad_words=["x"]))


def test_an_adapter_is_read_once_for_all_prompts_of_a_call(make):
    """So that they have the same one, even if its folder is rewritten meanwhile."""
    inputs, read = make(), []
    inputs._adapters = AdapterCache(
        lambda folder: read.append(folder) or [np.array(len(read), np.float32)], 2
    )
    adapter = LoRARequest("live", 1, "live", load_inplace=True)
    equal = LoRARequest("live", 1, "live", load_inplace=True)
    prompts = inputs.parse([[5], [6], [7], [8]])
    first = inputs.requests(prompts, lora_request=adapter)
    second = inputs.requests(prompts, lora_request=[adapter, None, equal, adapter])
    assert len({request.adapter.key for request in first}) == 1
    assert [request.adapter and request.adapter.key for request in second].count(None) == 1
    assert len({request.adapter for request in second}) == 2
    assert read == ["live"] * 2
    with pytest.raises(ValueError, match="must be a LoRARequest"):
        inputs.requests(prompts, lora_request=[{}] * 4)
    for wrong in (5, "live", {}, object):
        with pytest.raises(ValueError, match="lora_request must be a LoRARequest, got"):
            inputs.requests(prompts, lora_request=wrong)
