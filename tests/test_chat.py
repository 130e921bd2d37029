"""The conversation of `jaxpage chat`: what is asked of the engine, and what is printed.

The device is fake, the tokenizer real.
"""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxpage import tiny
from jaxpage.chat import ROOM, Conversation, converse, stream
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.llm import LLM
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import load_tokenizer
from tests.fakes import FakeFieldsEngine, FakeRunner

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """LLMs of a given `max_model_len`."""
    folder = str(tiny.build(tmp_path_factory.mktemp("chat") / "tiny"))
    tokenizer, hf_config = load_tokenizer(folder), load_hf_config(folder)

    def make(max_model_len: int = 256, **options) -> LLM:
        options = {"model": folder, "max_model_len": max_model_len} | options
        config = EngineConfig(**options).resolve(hf_config, platform="cpu")
        scheduler = Scheduler(
            KVCache(400, 4, enable_prefix_caching=True),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=config.max_model_len,
        )
        built = SimpleNamespace(
            engine=FakeFieldsEngine(scheduler, FakeRunner(400, 4), overlap=True),
            config=config,
            tokenizer=tokenizer,
            vocab_size=512,
            eos_token_ids=(2,),
            default_sampling={},
            has_recurrent_state=False,
            picture_processor=None,
            adapters=None,
            research=None,
            memory=None,
        )
        return LLM.from_built(built)

    return make


def chat(llm: LLM, *lines: str, params=SHORT, **options) -> tuple[Conversation, str]:
    """A conversation that ends with the input, and what was printed."""
    screen, rest = io.StringIO(), iter(lines)

    def read() -> str:
        if (line := next(rest, None)) is None:
            raise EOFError
        return line

    console = Console(file=screen, width=200)
    return converse(llm, console, params, read=read, **options), screen.getvalue()


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.turns]


def test_pieces_make_the_text_that_generate_returns(make):
    llm, pieces = make(), []
    prompt = llm.get_tokenizer().encode("Once upon a time")
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    output = stream(llm, prompt, params, pieces.append)
    (whole,) = llm.generate(prompt, params, use_tqdm=False)
    assert "".join(pieces) == output.outputs[0].text == whole.outputs[0].text
    assert output.finished and len(pieces) > 5


def test_an_exception_of_the_writer_ends_the_request(make):
    llm = make()

    def write(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(llm, [5, 6, 7], SHORT, write)
    assert not llm.has_unfinished_requests()
    assert stream(llm, [5, 6, 7], SHORT, lambda piece: None).finished


def test_the_conversation_is_kept_and_found_in_the_cache(make):
    conversation, printed = chat(make(), "one", "", "two", system="Be brief.")
    one, first, two, second = contents(conversation)
    assert (one, two) == ("one", "two")
    assert first in printed and second in printed
    figures = [line for line in printed.splitlines() if "prompt tokens cached" in line]
    assert len(figures) == 2
    assert "8 tokens" in figures[0] and ", 0 of " not in figures[1]


def test_the_system_prompt_comes_first(make):
    llm = make()
    with_system, _ = Conversation(llm, "Be brief.").ask("one")
    without, _ = Conversation(llm).ask("one")
    text = llm.get_tokenizer().decode(with_system)
    assert "Be brief." in text and text.endswith(llm.get_tokenizer().decode(without))


def test_reset_and_exit_and_unknown_commands(make):
    conversation, printed = chat(make(), "one", "/reset", "two", "/nonsense x", "/exit", "three")
    assert contents(conversation)[0::2] == ["two"]
    assert "begins anew" in printed and "/nonsense is not a command" in printed


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(make, monkeypatch):
    llm, step, calls = make(), LLM.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 7:  # some tokens have come, not all
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted)
    conversation, printed = chat(llm, "one", "two")
    one, first, two, second = contents(conversation)
    assert printed.count("stopped") == printed.count("prompt tokens cached") == 1
    assert first and second
    assert not llm.has_unfinished_requests()


def test_ctrl_c_before_the_first_token_forgets_the_question(make, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "step", interrupted)
    conversation, _ = chat(make(), "one")
    assert conversation.turns == []


def test_ctrl_c_at_the_prompt_says_how_to_leave(make):
    lines = iter([KeyboardInterrupt, EOFError])

    def read() -> str:
        raise next(lines)

    screen = io.StringIO()
    converse(make(), Console(file=screen, width=200), SHORT, read=read)
    assert screen.getvalue().count("Ctrl-D ends") == 2


def test_a_conversation_that_outgrows_the_model_loses_its_oldest_turns(make):
    conversation, printed = chat(make(max_model_len=96), *(f"question {i}" for i in range(8)))
    kept = contents(conversation)[0::2]
    assert 1 <= len(kept) < 8 and kept[-1] == "question 7"
    assert "outgrew the 96 tokens" in printed and "are forgotten" in printed


def test_a_message_that_is_too_long_is_not_sent(make):
    conversation, printed = chat(make(max_model_len=64), "one " * 100, "two")
    assert contents(conversation)[0::2] == ["two"]
    assert "of the 64 that the model can hold" in printed


def test_room_is_kept_for_the_answer(make):
    llm = make(max_model_len=64)
    assert ROOM > 64 // 4
    conversation, _ = chat(llm, "one", params=SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(contents(conversation)[1]) > 16 // 2  # a quarter, whatever the question took


def test_models_that_cannot_chat_are_refused(make, monkeypatch):
    llm = make()
    with pytest.raises(ValueError, match="one answer at a time, n=2"):
        chat(llm, params=SamplingParams(n=2))
    template = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}x"
    with pytest.raises(ValueError, match="no system, please"):
        chat(make(chat_template=template), system="Be brief.")
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template.*--chat-template FILE"):
        chat(llm)


def test_lines_of_stdin_are_shown(make, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/exit\n"))
    screen = io.StringIO()
    conversation = converse(make(), Console(file=screen, width=200), SHORT)
    assert contents(conversation)[0] == "one"
    assert capsys.readouterr().out == "> one\n> /exit\n"


def test_an_answer_says_which_limit_cut_it_off(make):
    _, screen = chat(make(), "hello")
    assert "cut off: max_tokens=8" in screen
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    _, screen = chat(make(64), "hello", params=long)
    assert "cut off: no room for more" in screen
