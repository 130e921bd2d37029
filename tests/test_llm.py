"""LLM drives an engine: prompts of every form, order, defaults, refusals, interruptions."""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
import signal
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxpage import BeamSearchParams, EngineArgs, LoRARequest
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.input_processor import derive_seed
from jaxpage.llm import LLM
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.tokenizer import load_tokenizer
from tests.fake_device import EOS, MAX_MODEL_LEN, fake_built
from tests.fakes import expected_output
from tests.few_programs import few_programs
from tests.sampling.oracle import Row, forced_token

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="session")
def folder(tiny_folder) -> str:
    return tiny_folder


@pytest.fixture(scope="session")
def make(folder):
    """LLMs whose device is fake and whose tokenizer is real."""
    tokenizer = load_tokenizer(folder)
    hf_config = load_hf_config(folder)

    def make(**options) -> LLM:
        return LLM.from_built(fake_built(folder, hf_config, tokenizer, **options))

    return make


def expected(llm: LLM, prompt: list[int], params: SamplingParams, number: int) -> list[list[int]]:
    """Tokens of each sequence of the LLM's `number`-th request, by the loop without an engine."""
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        prompt_embeds=None,
        pictures=None,
        mask_source=None,
        adapter=None,
        params=params,
        seed=derive_seed(0, number) if params.seed is None else params.seed,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset([EOS]),
        stop_token_ids=frozenset(params.stop_token_ids)
        | (frozenset() if params.ignore_eos else frozenset([EOS])),
    )
    return [expected_output(request, i, MAX_MODEL_LEN)[0] for i in range(params.n)]


def tokens(outputs) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(make):
    llm = make()
    prompts = [[i, i + 1, 7] for i in range(3, 23)]
    params = [SamplingParams(max_tokens=30 - i, n=1 + i % 3) for i in range(20)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert tokens(outputs) == [
        expected(llm, p, s, i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    assert all(o.finished for o in outputs)
    assert [o.request_id for o in outputs] == [str(i) for i in range(20)]


def test_every_form_of_a_prompt_is_the_same_prompt(make):
    text = "the dog"
    ids = make().get_tokenizer()(text)["input_ids"]
    params = SamplingParams(seed=5)
    forms = [
        text,
        {"prompt": text},
        ids,
        tuple(ids),
        {"prompt_token_ids": ids},
        {"prompt": text, "prompt_token_ids": ids, "cache_salt": "s"},
    ]
    for form in forms:
        (output,) = make().generate(form, params)
        assert output.prompt_token_ids == ids
        assert output.prompt == (text if isinstance(form, str) or "prompt" in form else None)
        assert tokens([output]) == [expected(make(), ids, params, 0)]
    outputs = make().generate(forms, params)
    assert len(outputs) == len(forms)
    assert len({str(t) for t in tokens(outputs)}) == 1


def test_text_is_the_decoded_output_without_the_stop_token(make):
    llm = make()
    for output in llm.generate([[i] for i in range(3, 40)], SamplingParams(max_tokens=60)):
        (completion,) = output.outputs
        ids = completion.token_ids
        assert completion.text == llm.get_tokenizer().decode(ids, skip_special_tokens=True)
        assert completion.finish_reason == ("stop" if ids[-1] == EOS else "length")
        assert completion.stop_reason is None


def test_without_params_the_models_defaults_are_used(make):
    llm = make(default_sampling={"max_tokens": 3, "temperature": 0.5})
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.5)
    (output,) = llm.generate([5, 6])
    assert len(output.outputs[0].token_ids) <= 3


def test_max_tokens_none_fills_the_model(make):
    (output,) = make().generate([5, 6], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 2
    assert output.outputs[0].finish_reason == "length"


def test_no_prompts_no_outputs(make):
    assert make().generate([]) == []


def test_seeds_derive_from_the_engine_and_the_number_of_the_request(make):
    prompts = [[5, 6]] * 4
    first, again = make().generate(prompts, LONG), make().generate(prompts, LONG)
    assert tokens(first) == tokens(again)
    assert len({str(t) for t in tokens(first)}) == 4
    assert tokens(make(seed=1).generate(prompts, LONG)) != tokens(first)
    seeded = SamplingParams(seed=2**32 + 3, max_tokens=40, ignore_eos=True)
    plain = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    assert tokens(make().generate(prompts, seeded)) == tokens(make().generate(prompts, plain))


BAD = {
    "empty text": ("", {}, "empty"),
    "empty ids": ({"prompt_token_ids": []}, {}, "at least one token"),
    "no prompt": ({"text": None}, {}, "needs"),
    "wrong type": (5.0, {}, "must be a str"),
    "ids and text": ([1, "a"], {}, "position 1"),
    "float id": ({"prompt_token_ids": [1.0]}, {}, "position 0"),
    "too long": ([5] * 64, {}, "length is 64 tokens. However, your prompt contains 64 input"),
    "unknown id": ([5, 512], {}, r"512, the vocabulary has ids 0\.\.511"),
    "negative id": ({"prompt_token_ids": [-1]}, {}, "-1"),
    "images": ({"prompt": "a", "multi_modal_data": {"image": [1]}}, {}, "multi_modal_data"),
    "salt": ({"prompt": "a", "cache_salt": ""}, {}, "cache_salt"),
    "stop id": ([5], {"stop_token_ids": [512]}, "stop_token_ids has 512"),
    "allowed id": ([5], {"allowed_token_ids": [600]}, "allowed_token_ids has 600"),
    "bias id": ([5], {"logit_bias": {-1: 1}}, "logit_bias has -1"),
    "logprobs": ([5], {"logprobs": 21}, "logprobs=21 is more than max_logprobs=20"),
    "prompt logprobs": ([5], {"prompt_logprobs": 21}, "more than max_logprobs=20"),
    "logprob id": ([5], {"logprob_token_ids": [512]}, "logprob_token_ids has 512"),
    "prompt logprob rows": (
        [5],
        {"prompt_logprob_token_ids": [[1], [2]]},
        r"prompt_logprob_token_ids has 2 rows, but a prompt of 1 tokens has 0 to be scored",
    ),
    "prompt logprob ids": (
        [5, 6],
        {"prompt_logprob_token_ids": [[9] * 21]},
        "prompt_logprob_token_ids has 21 ids in a row, which is more than max_logprobs=20",
    ),
    "min tokens": (
        [5],
        {"max_tokens": None, "min_tokens": 64},
        "min_tokens=64 is more than the 63 tokens that max_model_len=64 leaves",
    ),
    "truncation": ([5], {"truncate_prompt_tokens": 65}, "65 is more than max_model_len=64"),
    "truncated too little": ([5] * 64, {"truncate_prompt_tokens": 64}, "no room for an answer"),
    "schema": (
        [5],
        {"structured_outputs": {"json": {"properties": {"a": {"type": "x"}}}}},
        r"at \$\.properties\.a: Invalid type",
    ),
    "long bad word": ([5], {"bad_words": ["€" * 20]}, "1 to 16"),
    "surrogate in a bad word": ([5], {"bad_words": ["\ud800"]}, "bad_words .* lone surrogate"),
    "many bad words": ([5], {"bad_words": [f"q{i}" for i in range(129)]}, "limit is 128"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_prompt_that_cannot_be_served_stops_the_others_before_they_start(make, name):
    prompt, options, message = BAD[name]
    llm = make()
    good = SamplingParams()
    with pytest.raises(ValueError, match=message):
        llm.generate([[5], prompt, [6]], [good, SamplingParams(**options), good])
    assert llm.get_num_unfinished_requests() == 0
    assert llm.stats().num_steps == llm.stats().num_requests_finished == 0
    with pytest.raises(ValueError, match=message):
        llm.add_request("a", prompt, SamplingParams(**options))
    assert not llm.has_unfinished_requests()


def test_lists_of_another_length_are_refused(make):
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2"):
        make().generate([[5], [6]], [SamplingParams()])
    with pytest.raises(ValueError, match="priority has 3 entries for 2"):
        make(scheduling_policy="priority").generate([[5], [6]], priority=[1, 2, 3])
    with pytest.raises(ValueError, match="priority has 0 entries for 2"):
        make().generate([[5], [6]], priority=[])
    with pytest.raises(ValueError, match="SamplingParams"):
        make().generate([[5]], {"max_tokens": 3})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_count_only_with_their_policy(make, policy):
    llm = make(scheduling_policy=policy)
    assert len(llm.generate([[5], [6]], priority=[2, 1])) == 2
    params = SamplingParams(max_tokens=1)
    for number in range(17):  # one more than run at a time
        llm.add_request(str(number), [5], params, priority=-number)
    first = {output.request_id for output in llm.step()} or {o.request_id for o in llm.step()}
    assert ("0" in first) == (policy == "fcfs") and ("16" in first) == (policy == "priority")
    while llm.has_unfinished_requests():
        llm.step()


def test_the_prefix_cache_can_be_reset_while_requests_run(make):
    llm = make()
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    expected = tokens(llm.generate([prompt], params))
    llm.add_request("a", prompt, params)
    for _ in range(3):
        llm.step()
    assert llm.reset_prefix_cache() is llm.reset_prefix_cache(False, True) is False
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    assert llm.stats().num_preemptions == 1
    while llm.has_unfinished_requests():
        outputs = llm.step()
    assert tokens(outputs) == expected
    assert llm.reset_prefix_cache(True, True) is True


def test_all_logprobs_can_be_had_if_the_engine_allows_it(make):
    (output,) = make(max_logprobs=-1).generate([5], SamplingParams(logprobs=-1, max_tokens=2))
    assert output.outputs[0].logprobs
    for position, token_id in zip(
        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
    ):
        assert position[token_id].decoded_token is not None


def test_without_a_tokenizer_ids_go_in_and_come_out(make):
    llm = make(skip_tokenizer_init=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6]}, LONG)
    assert output.outputs[0].text == ""
    assert tokens([output]) == [expected(llm, [5, 6], LONG, 0)]
    for attempt in (
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.generate([5], SamplingParams(bad_words=["x"])),
        llm.get_tokenizer,
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            attempt()


def test_chat_renders_the_template(make):
    llm = make()
    messages = [{"role": "user", "content": "the dog"}]
    (output,) = llm.chat(messages, SamplingParams())
    assert output.prompt == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = llm.get_tokenizer()
    assert (
        output.prompt_token_ids == tokenizer(output.prompt, add_special_tokens=False)["input_ids"]
    )
    assert output.prompt_token_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "dog"}],
        }
    ]
    two = llm.chat([messages, parts], SamplingParams(), add_generation_prompt=False)
    assert [o.prompt for o in two] == [
        "<|im_start|>user\nthe dog<|im_end|>\n",
        "<|im_start|>user\nthe\ndog<|im_end|>\n",
    ]


def test_chat_takes_other_templates(make):
    messages = [{"role": "user", "content": "x"}]
    template = "{{ messages[0].content }}{{ mark }}"
    (output,) = make().chat(messages, chat_template=template, chat_template_kwargs={"mark": "!"})
    assert output.prompt == "x!"
    (output,) = make(chat_template=template).chat(messages)
    assert output.prompt == "x"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"content": "x"}], {}, "role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ raise( }}"}, "cannot render"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "add_generation"),
    ],
)
def test_chats_that_cannot_be_rendered_are_refused(make, messages, options, message):
    with pytest.raises(ValueError, match=message):
        make().chat(messages, **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_step_by_step_gives_the_same_as_generate(make, overlap):
    prompts = [[i, 5] for i in range(3, 9)]
    params = SamplingParams(max_tokens=9, n=2)
    llm = make(async_scheduling=overlap)
    for i, prompt in enumerate(prompts):
        llm.add_request(f"r{i}", prompt, params)
    assert llm.get_num_unfinished_requests() == 6
    last, seen = {}, {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            for old, new in zip(seen.get(output.request_id, []), output.outputs, strict=False):
                assert new.text.startswith(old.text)
            seen[output.request_id] = output.outputs
            assert output.request_id not in last, "reported after its end"
            if output.finished:
                last[output.request_id] = output
    outputs = [last[f"r{i}"] for i in range(6)]
    assert tokens(outputs) == tokens(make().generate(prompts, params))
    assert llm.step() == []
    assert not llm._engine.has_unfinished_requests()


def test_an_id_can_be_used_again_when_it_is_free(make):
    llm = make()
    llm.add_request("a", [5], LONG)
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.add_request("a", [6], LONG)
    with pytest.raises(ValueError, match="str"):
        llm.add_request(3, [6], LONG)
    llm.abort_request(["a", "unknown"])
    assert not llm.has_unfinished_requests()
    llm.add_request("a", [6], LONG)
    llm.abort_request("a")


def test_generate_does_not_disturb_requests_that_were_added_before(make):
    llm = make()
    llm.add_request("1", [5, 6], LONG)
    outputs = llm.generate([[3], [4]], SamplingParams(max_tokens=3))
    assert sorted({o.request_id for o in outputs} | {"1"}) == sorted({"1", "_1", "2"})
    (partial,) = llm.step()
    assert partial.request_id == "1"
    while llm.has_unfinished_requests():
        for output in llm.step():
            partial = output
    assert tokens([partial]) == [expected(llm, [5, 6], LONG, 0)]


def test_params_may_be_changed_after_they_were_given(make):
    llm = make()
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
    llm.add_request("a", [5], params)
    params.logprobs = 0
    while llm.has_unfinished_requests():
        outputs = llm.step()
    assert all(len(position) >= 2 for position in outputs[0].outputs[0].logprobs)


def test_no_step_is_left_under_way_when_all_is_answered(make):
    """An overlapped loop learns of an EOS one step late, and has launched the next by then."""
    llm = make(async_scheduling=True)
    params = SamplingParams(max_tokens=60)
    reasons = set()
    for prompt in range(3, 13):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        reasons.add(output.outputs[0].finish_reason)
        assert not llm._engine.has_unfinished_requests()
    assert "stop" in reasons


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_waits_for_the_step_and_aborts_only_what_generate_added(make, overlap):
    llm = make(async_scheduling=overlap)
    llm.add_request("mine", [5, 6], LONG)
    step, whole_steps = llm._engine.step, []

    def interrupted_step():
        if len(whole_steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        touched = step()
        whole_steps.append(len(touched.rows))
        return touched

    llm._engine.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4]], LONG)
    assert len(whole_steps) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.get_num_unfinished_requests() == 1
    llm._engine.step = step
    last = None
    while llm.has_unfinished_requests():
        for last in llm.step():
            assert last.request_id == "mine"
    assert tokens([last]) == [expected(llm, [5, 6], LONG, 0)]
    assert llm.generate([7], LONG)[0].finished
    assert llm.reset_prefix_cache()


def test_a_thread_that_is_not_the_main_one_can_generate(make):
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(make().generate([5], LONG)))
    thread.start()
    thread.join()
    assert tokens(outputs) == [expected(None, [5], LONG, 0)]


def test_a_failed_step_ends_the_call_and_leaves_the_engine_usable(make):
    llm = make(fail_collect=(2,))
    llm.add_request("mine", [5, 6], LONG)
    with pytest.raises(RuntimeError, match="fails as told"):
        llm.generate([[3], [4]], LONG)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("mine", "abort")]
    assert llm.generate([7], LONG)[0].finished


def test_progress_tells_speeds(make):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.count, self.postfix = options, 0, options["postfix"]
            self.format_dict = {"elapsed": 2.0}
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def update(self, count):
            self.count += count

        def refresh(self):
            pass

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    make().generate([[5, 6], [7, 8]], params, use_tqdm=Bar)
    (bar,) = bars
    assert (bar.options["total"], bar.options["desc"], bar.count) == (2, "Processed prompts", 2)
    assert bar.postfix == "est. speed input: 2.00 toks/s, output: 4.00 toks/s"


def test_ids_that_are_no_list_are_refused(make):
    with pytest.raises(ValueError, match="a prompt must be"):
        make().generate({"prompt_token_ids": 5})


def test_calls_take_vllm_s_options_in_its_order(make):
    """Those of vLLM 0.32, keyword-only ones behind the star; our own come last."""

    def names(function) -> list[str]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        kinds = {p.name: p.kind for p in parameters}
        return [f"*{n}" if k is inspect.Parameter.KEYWORD_ONLY else n for n, k in kinds.items()]

    assert names(LLM.generate) == [
        "prompts", "sampling_params", "*use_tqdm", "*lora_request", "*priority",
        "*tokenization_kwargs", "*mm_processor_kwargs",
    ]  # fmt: skip
    assert names(LLM.chat) == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "priority", "chat_template",
        "chat_template_content_format", "add_generation_prompt", "continue_final_message", "tools",
        "chat_template_kwargs", "tokenization_kwargs", "mm_processor_kwargs", "tool_choice",
    ]  # fmt: skip
    assert names(LLM.beam_search) == [
        "prompts", "params", "lora_request", "use_tqdm", "concurrency_limit"
    ]  # fmt: skip
    llm = make(scheduling_policy="priority")
    messages = [{"role": "user", "content": [{"type": "text", "text": "the"}]}]
    (output,) = llm.chat(messages, SamplingParams(), False, None, 3, None, "string")
    assert output.finished and "the" in output.prompt
    with pytest.raises(ValueError, match="chat_template_content_format"):
        llm.chat(messages, chat_template_content_format="xml")


def test_adapters_need_an_engine_that_has_room_for_them(make):
    llm = make()
    adapter = LoRARequest("adapter", 1, "nowhere")
    messages = [{"role": "user", "content": "x"}]
    for attempt in (
        lambda: llm.generate([5], lora_request=adapter),
        lambda: llm.generate([5], lora_request=[adapter]),
        lambda: llm.chat(messages, lora_request=adapter),
        lambda: llm.beam_search([[5]], BeamSearchParams(2, 3), adapter),
        lambda: llm.add_request("a", [5], SamplingParams(), lora_request=adapter),
        lambda: llm.add_lora(adapter),
        lambda: llm.remove_lora(1),
        llm.list_loras,
    ):
        with pytest.raises(ValueError, match="enable_lora=True"):
            attempt()
    with pytest.raises(ValueError, match="lora_request has 2 entries for 1 prompts"):
        llm.generate([5], lora_request=[None, None])
    assert llm.generate([5], lora_request=[None])[0].lora_request is None
    assert not llm.has_unfinished_requests()


def test_options_of_later_versions_are_refused_by_name(make):
    llm = make()
    with pytest.raises(ValueError, match="mm_processor_kwargs"):
        llm.generate([5], mm_processor_kwargs={"size": 3})
    assert llm.generate([5], lora_request=None, mm_processor_kwargs=None)[0].finished
    assert not llm.has_unfinished_requests()


def test_tokenization_kwargs_reach_the_tokenizer(make):
    llm = make()
    text = "the dog<|im_end|>"
    kwargs = {"truncation": True, "max_length": 2}
    ids = llm.get_tokenizer()(text, **kwargs)["input_ids"]
    assert len(ids) == 2
    (output,) = llm.generate(text, SamplingParams(), tokenization_kwargs=kwargs)
    assert output.prompt_token_ids == ids
    llm.add_request("a", text, SamplingParams(), tokenization_kwargs=kwargs)
    while not (outputs := llm.step()):
        pass
    assert outputs[0].prompt_token_ids == ids
    llm.abort_request("a")
    messages = [{"role": "user", "content": text}]
    (output,) = llm.chat(messages, SamplingParams(), tokenization_kwargs=kwargs)
    assert len(output.prompt_token_ids) == 2


def test_generate_returns_final_outputs_whatever_kind_was_asked_for(make):
    expected = make().generate([[5], [6]], SamplingParams(max_tokens=9, n=2))
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=9, n=2, output_kind=kind)
        outputs = make().generate([[5], [6]], params)
        assert tokens(outputs) == tokens(expected)
        assert [[c.text for c in o.outputs] for o in outputs] == [
            [c.text for c in o.outputs] for o in expected
        ]
        assert params.output_kind is kind


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_report_what_the_kind_of_output_says(make, overlap):
    llm, got = make(async_scheduling=overlap), {kind.name: [] for kind in RequestOutputKind}
    for kind in RequestOutputKind:
        params = SamplingParams(max_tokens=12, n=2, seed=3, stop="o", output_kind=kind)
        assert llm.add_request(kind.name, [5, 6], params) == kind.name
    llm.generate([7], SamplingParams(max_tokens=2, ignore_eos=True))
    while llm.has_unfinished_requests():
        for output in llm.step():
            got[output.request_id].append(output)
    (final,) = got["FINAL_ONLY"]
    assert tokens([got["CUMULATIVE"][-1]]) == tokens([final])
    for index, completion in enumerate(final.outputs):
        deltas = [c for output in got["DELTA"] for c in output.outputs if c.index == index]
        assert sum((c.token_ids for c in deltas), []) == completion.token_ids
        assert "".join(c.text for c in deltas) == completion.text
        assert [c.finish_reason for c in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == completion.finish_reason
    # What came during `generate` is one delta.
    assert len(got["DELTA"][0].outputs[0].token_ids) >= 2


def test_the_engines_stream_interval_is_the_least_of_each_request(make):
    """As in vLLM, a request may ask for more."""
    llm = make(stream_interval=4, decode_steps=1)
    counts = {}
    for wanted, name in ((None, "none"), (2, "less"), (6, "more")):
        delta = RequestOutputKind.DELTA
        params = SamplingParams(
            max_tokens=12, ignore_eos=True, output_kind=delta, stream_interval=wanted
        )
        llm.add_request(name, [5, 6], params)
        counts[name] = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            counts[output.request_id].append(len(output.outputs[0].token_ids))
    assert counts == {"none": [1, 4, 4, 3], "less": [1, 4, 4, 3], "more": [1, 6, 5]}


def test_beam_search_answers_as_many_prompts_at_a_time_as_it_may(make):
    llm, params = make(), BeamSearchParams(2, 6)
    prompts = [[i, 5] for i in range(3, 9)]
    expected = make().beam_search(prompts, params)
    most, add = [], llm._engine.add

    def watched_add(request):
        add(request)
        most.append(llm.get_num_unfinished_requests())

    llm._engine.add = watched_add
    outputs = llm.beam_search(prompts, params, None, False, 2)
    assert [[s.tokens for s in o.sequences] for o in outputs] == [
        [s.tokens for s in o.sequences] for o in expected
    ]
    assert len(most) == 6 and max(most) == 2
    assert len(llm.beam_search(prompts, params, use_tqdm=True, concurrency_limit=1)) == 6
    with pytest.raises(ValueError, match="concurrency_limit must be None or at least 1, got 0"):
        llm.beam_search(prompts, params, concurrency_limit=0)


def test_vllm_s_engine_and_model_config_are_at_hand(make, folder):
    llm = make()
    engine = llm.llm_engine
    engine.add_request("a", [5], LONG)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].finished
    config, hf_config = llm.model_config, load_hf_config(folder)
    assert config.max_model_len == MAX_MODEL_LEN
    assert config.hf_config.to_dict() == config.hf_text_config.to_dict() == hf_config.to_dict()
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert config.get_vocab_size() == hf_config.vocab_size
    assert config.get_hidden_size() == hf_config.hidden_size
    assert config.get_total_num_hidden_layers() == hf_config.num_hidden_layers
    assert copy.deepcopy(config) == config


def test_add_request_takes_vllm_s_arguments_in_its_order(make):
    llm = make(scheduling_policy="priority")
    llm.add_request("a", [5], LONG, 1000.0, None, None, None, 3, prompt_text="x")
    while llm.has_unfinished_requests():
        outputs = llm.step()
    metrics = outputs[0].metrics
    assert metrics.arrival_time == 1000.0 and metrics.first_token_latency > 1e6
    with pytest.raises(ValueError, match="trace_headers"):
        llm.add_request("b", [5], LONG, trace_headers={"traceparent": "00"})
    assert not llm.has_unfinished_requests()


def test_an_llm_is_made_from_engine_args(make, folder, monkeypatch):
    built = []

    def build(config):
        built.append(config)
        return fake_built(folder, load_hf_config(folder), load_tokenizer(folder))

    monkeypatch.setattr("jaxpage.build.build", build)
    args = EngineArgs(model=folder, max_num_seqs=7)
    llm = LLM.from_engine_args(args)
    assert built == [args] and llm.generate([5], LONG)[0].finished


@pytest.mark.parametrize("prefix", [None, "first"])
def test_profiles_are_folders(make, tmp_path, monkeypatch, prefix):
    monkeypatch.chdir(tmp_path)
    llm = make()
    llm.start_profile(prefix)
    try:
        with pytest.raises(RuntimeError, match="already"):
            llm.start_profile()
    finally:
        llm.stop_profile()
    assert list((tmp_path / (prefix or "jaxpage_profile")).rglob("*.xplane.pb"))


def test_tokens_written_to_the_prefix_cache_are_counted(make):
    llm = make()
    outputs = [llm.generate([3] * 11, LONG)[0] for _ in range(2)]
    counts = [(o.num_cached_tokens, o.num_cache_creation_tokens) for o in outputs]
    assert counts == [(0, 8), (8, 0)]


def test_two_threads_at_once_are_told_apart(make):
    llm = make()
    inside, leave = threading.Event(), threading.Event()
    step = llm._engine.step

    def slow_step():
        inside.set()
        assert leave.wait(60)
        return step()

    llm._engine.step = slow_step
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate([5], LONG)), name="first")
    thread.start()
    assert inside.wait(60)
    for attempt in (
        lambda: llm.generate([6], LONG),
        lambda: llm.add_request("a", [6], LONG),
        llm.step,
        lambda: llm.abort_request("0"),
        llm.reset_prefix_cache,
    ):
        with pytest.raises(RuntimeError, match="while 'first' is in a call"):
            attempt()
    leave.set()
    thread.join()
    assert tokens(outputs) == [expected(llm, [5], LONG, 0)]
    assert llm.generate([6], LONG)[0].finished  # one after the other is fine


def test_a_forked_child_is_told_that_it_has_no_device(make):
    llm = make()
    assert llm.generate([5], LONG)[0].finished
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax and Python warn of forks
        child = os.fork()
    if child == 0:
        try:
            for call in (lambda: llm.generate([5], LONG), llm.step, llm.wait_until_warm):
                try:
                    call()
                except RuntimeError as e:
                    os.write(writable, f"{e}\n".encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as messages:
        told = messages.read().splitlines()
    wanted = f"made in process {os.getpid()}, and this is its forked child"
    assert len(told) == 3 and all(wanted in message for message in told)
    os.waitpid(child, 0)
    assert llm.generate([5], LONG)[0].finished


@pytest.mark.parametrize("overlap", [False, True])
def test_a_detokenizer_that_raises_ends_its_request_and_no_other(make, overlap):
    llm = make(async_scheduling=overlap)
    for name in ("doomed", "lucky"):
        llm.add_request(name, [5, 6], LONG)

    def append(token_id, *, ends, check_stop):
        raise RuntimeError("fails as told")

    llm._outputs._requests["doomed"].sequences[0].detokenizer.append = append
    outputs = {}
    with pytest.raises(RuntimeError, match="fails as told"):
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs["doomed"].outputs[0].finish_reason == "abort"
    assert tokens([outputs["lucky"]]) == [expected(llm, [5, 6], LONG, 1)]


def fail_to_name_tokens(llm: LLM, request_id: str) -> None:
    """Its outputs, which have logprobs, cannot be made."""

    def decode_token(*args):
        raise RuntimeError("fails as told")

    detokenizer = llm._outputs._requests[request_id].sequences[0].detokenizer
    detokenizer.decode_token = decode_token


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_output_that_cannot_be_made_costs_no_other_its_output(make, overlap, kind):
    """Neither of those that are made before it, nor after it."""
    llm = make(async_scheduling=overlap)
    names = ("before", "doomed", "after")
    for name in names:
        llm.add_request(name, [5, 6], replace(LONG, output_kind=kind, logprobs=1))
    fail_to_name_tokens(llm, "doomed")
    got = {name: [] for name in names}
    num_raised = 0
    while llm.has_unfinished_requests():
        try:
            for output in llm.step():
                got[output.request_id] += output.outputs[0].token_ids
        except RuntimeError as error:
            assert str(error) == "fails as told"
            num_raised += 1
    assert num_raised == 1 and not got["doomed"]
    for number, name in ((0, "before"), (2, "after")):
        assert [got[name]] == expected(llm, [5, 6], LONG, number)
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert llm.generate([7], LONG)[0].finished


def hold_an_output(llm: LLM, kind: RequestOutputKind) -> None:
    """That of "held", since `step` raises while it makes another."""
    for name in ("held", "doomed"):
        llm.add_request(name, [5, 6], replace(LONG, output_kind=kind, logprobs=1))
    fail_to_name_tokens(llm, "doomed")
    with pytest.raises(RuntimeError, match="fails as told"):
        while True:
            llm.step()


def test_an_output_that_was_held_is_not_returned_after_an_abort(make):
    llm = make()
    hold_an_output(llm, RequestOutputKind.DELTA)
    llm.abort_request("held")
    assert not llm.has_unfinished_requests() and llm.step() == []
    assert llm.reset_prefix_cache()


def test_the_id_of_an_output_that_was_held_is_in_use(make):
    llm = make()
    hold_an_output(llm, RequestOutputKind.FINAL_ONLY)
    with pytest.raises(ValueError, match="held"):
        llm.add_request("held", [7], LONG)
    assert [output.request_id for output in llm.step()] == ["held"]


@pytest.mark.slow
def test_min_tokens_masks_every_eos_id_even_if_eos_is_ignored(folder):
    """As vLLM does: benchmarks ask for both. Here the device is real."""

    def answers(eos: list[int], *options: dict) -> list[list[int]]:
        with few_programs():
            llm = LLM(
                folder,
                max_model_len=64,
                max_num_seqs=1,
                max_num_batched_tokens=16,
                num_gpu_blocks_override=8,
                enforce_eager=True,
                override_generation_config={"eos_token_id": eos},
            )
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, **given)
            for given in options
        ]
        return [o.outputs[0].token_ids for o in llm.generate([[5, 6, 7]] * len(params), params)]

    (free,) = answers([EOS], {})
    eos = [free[0], free[2]]  # further ids, which only the generation config knows
    unmasked, masked, banned = answers(
        eos, {}, {"min_tokens": 6}, {"logit_bias": {free[0]: -math.inf}}
    )
    assert unmasked == free
    assert len(masked) == 24
    assert not {*eos, EOS} & set(masked[:6])
    assert free[0] not in banned


@pytest.mark.slow
def test_a_thinking_budget_holds_however_the_engine_is_set(folder):
    """Chunks, preemptions and several steps in a launch change no token. Here the device is real."""
    words = {"reasoning_start_str": "<|im_start|>", "reasoning_end_str": "so, the dog."}
    params = [
        SamplingParams(
            thinking_token_budget=[None, 0, 4, 9][i % 4],
            temperature=[0, 1, 1][i % 3],
            n=[1, 2, 1][i % 3],
            max_tokens=30,
            ignore_eos=True,
        )
        for i in range(12)
    ]
    prompts = ["the dog <|im_start|> a cat" + " and a dog" * (i % 5) for i in range(12)]

    def outputs(**options):
        options |= {"max_model_len": 96, "max_num_seqs": 4, "enforce_eager": True}
        with few_programs():
            llm = LLM(folder, reasoning_config=words, **options)
        return llm, llm.generate(prompts, params, use_tqdm=False)

    plain = {"decode_steps": 1, "async_scheduling": False, "enable_prefix_caching": False}
    llm, want = outputs(num_gpu_blocks_override=60, max_num_batched_tokens=16, **plain)
    _, got = outputs(num_gpu_blocks_override=9, max_num_batched_tokens=16, decode_steps=8)
    assert tokens(got) == tokens(want)
    assert sum(output.metrics.num_preemptions for output in got) > 0

    start, end = (llm.get_tokenizer().encode(word) for word in words.values())
    markers = {"think_start": start, "think_end": end, "think_forced_end": end}
    num_forced = 0
    for output, param in zip(got, params, strict=True):
        budget = -1 if param.thinking_token_budget is None else param.thinking_token_budget
        for answer in (completion.token_ids for completion in output.outputs):
            for i, token in enumerate(answer):
                known = {"prompt": output.prompt_token_ids, "output": list(answer[:i])}
                forced = forced_token(Row(thinking_budget=budget, **known, **markers))
                assert forced in (None, token)
                num_forced += forced is not None
    assert num_forced >= 12 * len(end)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("collective_rpc", "update_weights replaces"),
        ("apply_model", "jaxpage.rl.Sampler"),
        ("enqueue", "use add_request"),
        ("enqueue_chat", "use add_request"),
        ("wait_for_completion", "use add_request"),
        ("get_metrics", r"llm.stats\(\)"),
    ],
)
def test_names_of_vllm_that_are_absent_say_what_to_use(name, instead, make):
    arguments = ["x"] if name in ("collective_rpc", "apply_model") else []
    with pytest.raises(NotImplementedError, match=instead):
        getattr(make(), name)(*arguments)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("vllm_config", "config has all options"),
        ("model_executor", "update_weights replaces"),
        ("tokenizer", r"call get_tokenizer\(\)"),
        ("finish_weight_update", "update_weights reads"),
        ("no_name_of_vllm", "attribute 'no_name_of_vllm'$"),
    ],
)
def test_attributes_of_vllm_that_are_absent_say_what_to_use(name, instead, make):
    llm = make()
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"'LLM' object has no attribute '{name}'") as raised:
        getattr(llm.llm_engine, name)
    assert re.search(instead, str(raised.value)) and raised.value.name == name


def test_an_attribute_error_inside_a_property_keeps_its_message(make, monkeypatch):
    llm = make()
    monkeypatch.setattr(type(llm), "model_config", property(lambda self: self.config.no_option))
    with pytest.raises(AttributeError, match="no attribute 'no_option'$"):
        _ = llm.model_config
    assert not hasattr(llm, "model_config")


def test_repr_is_one_line_about_the_engine(make, folder):
    llm = make()
    assert llm.reset_mm_cache() is None and llm.llm_engine is llm
    found = repr(llm)
    assert found.startswith(f"LLM({folder!r}, dtype=") and "\n" not in found
    for part in ("device='cpu'", f"max_model_len={MAX_MODEL_LEN}", "num_blocks=", "block_size=4"):
        assert part in found


def test_all_stop_token_ids():
    assert SamplingParams(stop_token_ids=[7, 5, 7]).all_stop_token_ids == {5, 7}
    assert SamplingParams().all_stop_token_ids == set()
