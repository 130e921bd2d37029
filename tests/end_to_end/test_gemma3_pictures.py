"""Whole engines with a tiny Gemma 3 and pictures against transformers: the tokens of a picture see each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.registry import picture_processor
from tests import checkpoints, picture_answers, picture_models
from tests.picture_answers import checked_answer, greedy
from tests.picture_models import (
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_IMAGE,
    gemma3_config,
    gemma_logits,
    pixels,
)

NEVER = range(GEMMA_IMAGE, GEMMA_END + 1)  # see `greedy`
GREEDY = greedy(NEVER)
seeing = partial(picture_answers.seeing, [GEMMA_BEGIN, GEMMA_IMAGE, GEMMA_END])
PICTURE = 16  # tokens; a window is 9, a step 40


def make_llm(path: Path, **options) -> LLM:
    """A step holds two pictures, so chunks end between those of a prompt."""
    given = {"max_model_len": 256, "max_num_batched_tokens": 40, "enforce_eager": True}
    return checkpoints.make_llm(path, **(given | options))


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 280, length).tolist()


PROMPTS = [
    seeing(text(5, 0), pixels(300, 240), text(9, 1)),
    seeing(
        text(5, 2), pixels(28, 28), text(3, 3), pixels(200, 500, 1), pixels(70, 56, 2), text(20, 4)
    ),
    seeing(text(30, 5), pixels(90, 90, 3)),
    text(30, 6),
    text(100, 7),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3") / "checkpoint"
    return picture_models.save(gemma3_config(), folder, seed="gemma 3 in the engine")


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    return make_llm(path)


@pytest.fixture(scope="module")
def checked(path, llm) -> Callable[[Any], list[int]]:
    """The answer to a prompt that is nowhere cached, which is that of transformers."""
    oracle = picture_models.torch_model(path)
    processor = picture_processor(load_hf_config(str(path)), path)
    assert processor is not None
    return partial(checked_answer, llm, processor, logits_of(oracle), GREEDY)


def logits_of(oracle) -> picture_answers.Logits:
    return lambda _, token_ids, pictures: gemma_logits(oracle, token_ids, pictures)


@pytest.fixture(scope="module")
def alone(checked) -> list[list[int]]:
    """The answer to each prompt by itself, in chunks."""
    return [checked(prompt) for prompt in PROMPTS]


def answers(llm: LLM, prompts=None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS if prompts is None else prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given"), [("gemma3", "pictures")])
def test_greedy_tokens_equal_transformers(alone, name, given):
    """One picture, three in several chunks, one at the end; and text alone."""
    assert [len(answer) for answer in alone] == [64] * len(PROMPTS)
    assert len({tuple(answer) for answer in alone}) == len(PROMPTS)


@pytest.mark.slow
def test_together_cold_and_warm_they_are_answered_alike(llm, alone):
    llm.reset_prefix_cache()
    before = llm.stats().num_encoded_pictures
    assert answers(llm) == alone
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone
    assert all(o.num_cached_tokens >= len(o.prompt_token_ids) - 8 for o in outputs)
    assert llm.stats().num_encoded_pictures == before


@pytest.mark.slow
def test_a_picture_of_which_half_is_cached_is_computed_from_there(llm, checked):
    """Of 40 tokens four blocks are found, and 23 .. 38 are the picture."""
    prompt = seeing(text(22, 10), pixels(90, 90, 3))
    llm.reset_prefix_cache()
    expected = checked(prompt)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens, len(output.prompt_token_ids)) == (32, 40)
    assert list(output.outputs[0].token_ids) == expected


@pytest.mark.slow
def test_crops_are_seen_as_pictures_of_their_own(path, tmp_path):
    """A long picture and two crops of it, in chunks; the crop of one is the whole of another."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    picture_models.save_tokenizer(tmp_path)
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50}
    llm = make_llm(tmp_path, skip_tokenizer_init=False, mm_processor_kwargs=options)
    processor = picture_processor(
        load_hf_config(str(tmp_path)), tmp_path, tokenizer=llm.get_tokenizer(), options=options
    )
    logits = logits_of(picture_models.torch_model(tmp_path))
    checked = partial(checked_answer, llm, processor, logits, GREEDY)
    wide = pixels(60, 120)
    prompt = seeing(text(5, 0), wide, text(9, 1))
    prompt["prompt_token_ids"].remove(GEMMA_IMAGE)
    prompt["prompt_token_ids"].remove(GEMMA_END)
    answer = checked(prompt)
    assert llm.stats().num_encoded_pictures == 3
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == answer
    assert output.num_cached_tokens >= len(output.prompt_token_ids) - 8
    checked(seeing(text(5, 2), wide[:, :60], text(9, 1)))
    checked(seeing(text(5, 3), wide[:, 60:], text(9, 1)))
    assert llm.stats().num_encoded_pictures == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_ones_are_answered_alike(path, alone, mode):
    llm = make_llm(
        path,
        num_gpu_blocks_override=60,
        swap_space=0.01,
        preemption_mode=mode,
        enable_prefix_caching=mode == "swap",
    )
    assert answers(llm) == alone
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_encoded_pictures == 5


@pytest.mark.slow
def test_two_devices_answer_as_one(path, alone):
    llm = make_llm(path, tensor_parallel_size=2)
    assert answers(llm, PROMPTS[:2]) == alone[:2]


@pytest.mark.slow
def test_there_is_one_encoder_and_nothing_compiles_later(path, alone):
    llm = make_llm(path, enforce_eager=False)
    llm.wait_until_warm()
    names = [record.name for record in llm.programs() if record.name.startswith("encode")]
    assert names == ["encode P=64"]
    assert answers(llm, PROMPTS[:2]) == alone[:2]
    assert llm.stats().num_recompiles == 0


@pytest.mark.slow
def test_a_step_must_hold_a_picture(path):
    llm = make_llm(path, max_num_batched_tokens=PICTURE - 1)
    with pytest.raises(ValueError, match="takes 16 tokens.* a step has 15: raise max_num_batched"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


@pytest.mark.slow
def test_without_pictures_only_the_text_part_is_loaded(path, alone):
    llm = make_llm(path, limit_mm_per_prompt={"image": 0})
    assert answers(llm, PROMPTS[3:]) == alone[3:]
    with pytest.raises(ValueError, match="pictures|multi_modal_data"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
