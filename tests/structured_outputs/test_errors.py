"""What is refused, where a schema is wrong, and grammars that fail while others run."""

from __future__ import annotations

import json
import threading

import pytest

from jaxpage import LLM, SamplingParams, StructuredOutputsConfig, StructuredOutputsParams
from jaxpage.demo import checkpoint
from jaxpage.structured_outputs.grammar import to_grammar
from tests import checkpoints
from tests.structured_outputs.conftest import make_llm


def tagged(**tag) -> dict:
    """In the form of xgrammar; the parts of one tag are as given, or right."""
    right = {"begin": "a", "content": {"json_schema": {}}, "end": "b"}
    return {"format": {"type": "triggered_tags", "triggers": ["a"], "tags": [right | tag]}}


TAGS = [  # and what is wrong with them
    ({"structures": [{"begin": 1}], "triggers": ["a"]}, "begin must be a string, got 1"),
    ({"structures": [5], "triggers": ["a"]}, "a tag must be an object, got 5"),
    ({"structures": 5, "triggers": ["a"]}, "structures must be a list, got 5"),
    ({"structures": [{"begin": "a"}], "triggers": [1]}, "a trigger must be a string, got 1"),
    ({"structures": [{"begin": "a"}], "triggers": "a"}, "triggers must be a list, got 'a'"),
    ({"structures": [{"begin": "a", "schema": {}, "end": 5}], "triggers": ["a"]}, "end must be"),
    (tagged(content=[]), r"content must be an object, got \[\]"),
    (tagged(content={}), "begin='a' has no JSON schema"),
    (tagged(end=[]), r"end must be a string, got \[\]"),
    (tagged(end=[7]), "end must be a string, got 7"),
    ({"format": {"type": "triggered_tags", "triggers": [], "tags": 5}}, "tags must be a list"),
]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"json": {"properties": {"a": {"items": {"type": "strin"}}}}},
            r"\$\.properties\.a\.items",
        ),
        ({"json": {"anyOf": [{"type": "null"}, {"minimum": "x"}]}}, r"\$\.anyOf\[1\]: Expected"),
        ({"json": {"$defs": {"x": {"pattern": "(a"}}, "$ref": "#/$defs/x"}}, r"\$\.\$defs\.x"),
        ({"json": {"properties": {"b": {"$ref": "#/zz"}}}}, "does not exist"),
        ({"json": '{"type": '}, "is no JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"regex": "(a"}, "the regex cannot be served"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"structural_tag": "{}"}, "'structures' is missing"),
        ({"structural_tag": "x"}, "structural_tag cannot be served"),
        *(
            ({"structural_tag": json.dumps(tag)}, f"the structural_tag cannot be served: {message}")
            for tag, message in TAGS
        ),
        ({"structural_tag": "[" * 1999}, "structural_tag cannot be served"),
        ({"regex": "x" * 3000}, "3000 bytes, and structured_outputs_config allows"),
    ],
)
def test_what_cannot_be_served_is_told_where(wanted, message):
    config = StructuredOutputsConfig(max_grammar_bytes=2000)
    with pytest.raises(ValueError, match=message):
        to_grammar(StructuredOutputsParams(**wanted), config)


def test_deep_schemas_are_refused():
    schema: dict = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    params = StructuredOutputsParams(json=schema)
    with pytest.raises(ValueError, match="more than 64 objects"):
        to_grammar(params, StructuredOutputsConfig(max_nesting=64))
    assert to_grammar(params, StructuredOutputsConfig())


@pytest.fixture(scope="module")
def llm(random_llm) -> LLM:
    return random_llm


def add(llm, name, structured_outputs, **options):
    params = SamplingParams(structured_outputs=structured_outputs, max_tokens=40, **options)
    llm.add_request(name, "The answer: ", params)


def finish(llm) -> dict:
    """The first completion of each request."""
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {o.request_id: o.outputs[0] for o in llm.step() if o.finished}
    return outputs


@pytest.fixture
def slow_compiler(llm, monkeypatch):
    """Grammars with "slow" in them are compiled when the event is set."""
    compiler, may_go = llm._inputs._grammars, threading.Event()
    compile_fast = type(compiler)._compile

    def compile_slowly(grammar):
        if "slow" in grammar:
            assert may_go.wait(60)
        if "fails" in grammar:
            raise ValueError("it is too complex")
        return compile_fast(compiler, grammar)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    yield may_go
    may_go.set()


@pytest.mark.slow
def test_a_grammar_that_is_being_compiled_holds_nobody_back(llm, slow_compiler):
    add(llm, "slow", {"regex": "slow"})
    add(llm, "fast", {"regex": "fast"})
    add(llm, "free", None, ignore_eos=True)
    ended = {}
    while len(ended) < 2:
        ended |= {o.request_id: o.outputs[0] for o in llm.step() if o.finished}
    assert ended["fast"].text == "fast" and len(ended["free"].token_ids) == 40
    threading.Timer(0.5, slow_compiler.set).start()
    before = llm.stats().num_steps
    assert finish(llm)["slow"].text == "slow"
    assert llm.stats().num_steps - before < 10  # it waited, and did not ask again and again


@pytest.mark.slow
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(llm, slow_compiler):
    slow_compiler.set()
    add(llm, "bad", {"regex": "fails"}, n=2, temperature=1.0)
    add(llm, "good", {"regex": "good"})
    outputs = finish(llm)
    assert outputs["bad"].finish_reason == "error"
    assert "it is too complex" in outputs["bad"].stop_reason
    assert outputs["good"].text == "good"
    assert llm.stats().num_blocks_used == 0


@pytest.mark.slow
def test_one_that_takes_too_long_is_given_up(slow_compiler, llm, monkeypatch):
    compiler = llm._inputs._grammars
    monkeypatch.setattr(compiler, "config", StructuredOutputsConfig(compile_timeout=0.3))
    add(llm, "late", {"regex": "slow too"})
    outputs = finish(llm)
    assert outputs["late"].finish_reason == "error"
    assert "not compiled within 0.3 s" in outputs["late"].stop_reason


@pytest.mark.slow
def test_masks_that_need_too_long():
    llm = make_llm(structured_outputs_config={"max_mask_time": 1e-6})
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a|b){1,99}"}}}
    params = SamplingParams(structured_outputs={"json": schema}, max_tokens=20)
    free = SamplingParams(max_tokens=5, ignore_eos=True)
    constrained, other = llm.generate(["a", "b"], [params, free], use_tqdm=False)
    assert constrained.outputs[0].finish_reason == "error"
    assert "structured output" in constrained.outputs[0].stop_reason
    assert len(other.outputs[0].token_ids) == 5


@pytest.mark.slow
def test_requests_that_wait_for_a_grammar_can_be_aborted(llm, slow_compiler):
    add(llm, "a", {"regex": "slow abort"})
    for _ in range(2):
        llm.step()
    llm.abort_request("a")
    assert not llm.has_unfinished_requests()
    assert llm.stats().num_blocks_used == 0


def test_without_a_tokenizer(tmp_path):
    llm = checkpoints.make_llm(checkpoint(), enforce_eager=True)
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, params)
