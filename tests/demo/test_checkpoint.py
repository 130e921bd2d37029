"""The packaged model: small, right about tables, and the same in transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxpage import LLM, SamplingParams
from jaxpage.demo import checkpoint, evaluate, save, text
from jaxpage.tiny import CHAT_TEMPLATE
from tests.few_programs import few_programs

GREEDY = SamplingParams(temperature=0, max_tokens=64)


def chats(seed: int, count: int, rows: tuple[int, ...]) -> list[tuple[list[dict[str, str]], str]]:
    """Held-out look-ups as messages, with the right answers."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        system, turn = evaluate.question(rng, "look_up", rows[number % len(rows)])
        found.append((text.messages(system, [turn]), turn.answer))
    return found


@pytest.fixture(scope="module")
def llm() -> LLM:
    with few_programs():
        return LLM(
            str(checkpoint()),
            dtype="bfloat16",
            max_num_seqs=8,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=512,
            enforce_eager=True,
        )


def test_it_is_small():
    params, _, _ = save.read(checkpoint())
    assert sum(p.size for p in params.values()) <= 3_000_000
    files = [path for path in checkpoint().iterdir() if path.name != "__pycache__"]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert Path(checkpoint() / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.slow  # compiles
def test_talk_needs_no_table(llm):
    (answer,) = llm.chat([{"role": "user", "content": "What is your name?"}], GREEDY)
    assert answer.outputs[0].text == "My name is Pip. I am a very small assistant."
    assert answer.outputs[0].finish_reason == "stop"


@pytest.mark.slow  # 100 tables
def test_look_ups_in_unseen_tables_of_up_to_eight_rows_are_right(llm):
    asked = chats(1, 100, rows=(1, 2, 3, 4, 5, 6, 7, 8))
    answers = llm.chat([messages for messages, _ in asked], GREEDY)
    right = [a.outputs[0].text == expected for a, (_, expected) in zip(answers, asked, strict=True)]
    assert sum(right) >= 95


@pytest.mark.slow  # loads transformers' model
def test_transformers_says_the_same(llm):
    # No stories: their first words are equally likely, so rounding picks one.
    asked = [messages for messages, _ in chats(2, 5, rows=(2, 4, 6, 8, 12))]
    asked += [
        [{"role": "user", "content": question}]
        for question in (
            "Hello!",
            "What is 12 + 7?",
            "Who are you?",
            "What is 512 + 389?",
            "What can you do?",
        )
    ]
    theirs = [_generate(messages) for messages in asked]
    ours = [answer.outputs[0].text for answer in llm.chat(asked, GREEDY)]
    assert ours == theirs


def _generate(messages: list[dict[str, str]]) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint())
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.bfloat16)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, do_sample=False, max_new_tokens=64)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
