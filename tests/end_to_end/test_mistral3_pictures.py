"""Whole engines with a tiny Mistral 3 and pictures, whose tokens stand in rows, against transformers' torch model."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxpage import LLM
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.registry import picture_processor
from jaxpage.tokenizer import load_tokenizer
from tests import checkpoints, picture_answers, picture_models
from tests.picture_answers import checked_answer, greedy
from tests.picture_models import (
    MISTRAL_END,
    MISTRAL_IMAGE,
    mistral3_config,
    mistral3_logits,
    pixels,
)

NEVER = range(MISTRAL_IMAGE, MISTRAL_END + 1)  # see `greedy`
GREEDY = greedy(NEVER)
seeing = partial(picture_answers.seeing, [MISTRAL_IMAGE])
OPTIONS = {"size": {"longest_edge": 120}}
# As those of released checkpoints.
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}[IMG]"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def make_llm(path: Path, **options) -> LLM:
    """A step ends within most pictures."""
    given = {
        "max_model_len": 384,
        "max_num_batched_tokens": 48,
        "enforce_eager": True,
        "mm_processor_kwargs": OPTIONS,
        "skip_tokenizer_init": False,  # it knows the tokens that end rows
    }
    return checkpoints.make_llm(path, **(given | options))


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, length).tolist()


PROMPTS = [
    seeing(text(5, 0), pixels(300, 240), text(9, 1)),
    seeing(text(5, 2), pixels(20, 28), pixels(200, 500, 1), text(20, 4), pixels(12, 9)),
    seeing(pixels(90, 90, 3)),
    text(30, 6),
    text(100, 7),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mistral3") / "checkpoint"
    path = picture_models.save(mistral3_config(), folder, seed="mistral3")
    picture_models.save_tokenizer(path)
    llm = make_llm(path)
    oracle = picture_models.torch_model(path)
    processor = picture_processor(
        load_hf_config(str(path)), path, tokenizer=load_tokenizer(str(path)), options=OPTIONS
    )
    found = SimpleNamespace(path=path, llm=llm, oracle=oracle, processor=processor)
    checked = partial(checked_answer, llm, processor, partial(mistral3_logits, oracle), GREEDY)
    found.alone = [checked(prompt) for prompt in PROMPTS]
    return found


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given"), [("mistral3", "pictures")])
def test_greedy_tokens_equal_transformers(loaded, name, given):
    """One picture in several chunks, three of different sizes, one alone; and text."""
    assert [len(answer) for answer in loaded.alone] == [64] * len(PROMPTS)
    assert len({tuple(answer) for answer in loaded.alone}) == len(PROMPTS)


@pytest.mark.slow
def test_together_cold_and_warm_they_are_answered_alike(loaded):
    llm = loaded.llm
    llm.reset_prefix_cache()
    before = llm.stats().num_encoded_pictures
    assert answers(llm) == loaded.alone
    assert answers(llm) == loaded.alone
    assert llm.stats().num_encoded_pictures == before == 5
    assert llm.stats().prefix_cache_hits > 0


@pytest.mark.slow
def test_messages_and_texts_are_answered_alike(loaded):
    """Each form of a prompt with two pictures has the same tokens, and so has a prompt that has them all."""
    images = [Image.fromarray(pixels(90, 150)), Image.fromarray(pixels(30, 20, 1))]
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    question = {"type": "text", "text": "same?"}
    messages = [{"role": "user", "content": [parts[0], question, parts[1]]}]
    llm, params = loaded.llm, dataclasses.replace(GREEDY, max_tokens=8)
    (chatted,) = llm.chat(messages, params, chat_template=TEMPLATE, use_tqdm=False)
    media = {"multi_modal_data": {"image": images}}
    texts = {"prompt": "[user][IMG]same?[IMG]", **media}
    whole = {"prompt_token_ids": chatted.prompt_token_ids, **media}
    for prompt in (texts, whole):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == chatted.prompt_token_ids
        assert output.outputs[0].token_ids == chatted.outputs[0].token_ids
    # 6 rows of 10 embeddings, 3 of 2, each with its end.
    assert chatted.prompt_token_ids.count(MISTRAL_IMAGE) == 66
    assert sum(token in NEVER for token in chatted.prompt_token_ids) == 66 + 6 + 3


@pytest.mark.slow
def test_preempted_and_evicted_ones_are_answered_alike_on_two_devices(loaded):
    """Room for the embeddings of the largest picture and few more; blocks for less than two answers."""
    llm = make_llm(
        loaded.path,
        num_gpu_blocks_override=80,
        tensor_parallel_size=2,
        swap_space=0.01,
        preemption_mode="swap",
        mm_encoder_cache_bytes=105 * 48 * 4,
    )
    assert answers(llm) == loaded.alone
    assert llm.stats().num_preemptions > 0
    llm.reset_prefix_cache()
    assert answers(llm) == loaded.alone
    assert llm.stats().num_encoded_pictures > 5
