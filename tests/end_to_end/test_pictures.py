"""Whole engines with pictures against transformers' torch model: in chunks, cached, preempted, in conversations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.registry import picture_processor
from jaxpage.pictures.border import Expanded, Picture
from jaxpage.replay import replay
from jaxpage.tokenizer import load_tokenizer
from tests import checkpoints, picture_models
from tests.few_programs import few_programs
from tests.picture_answers import check_answer, greedy
from tests.picture_models import (
    END,
    IMAGE,
    START,
    VIDEO,
    pixels,
    qwen2_5_vl_config,
    qwen3_5_config,
    qwen3_5_moe_config,
    qwen3_vl_config,
    qwen3_vl_moe_config,
)

NEVER = range(START, VIDEO + 1)  # see `greedy`
GREEDY = greedy(NEVER)
CONFIGS = {
    "qwen2_5_vl": qwen2_5_vl_config,
    "qwen3_vl": qwen3_vl_config,
    "qwen3_vl_moe": qwen3_vl_moe_config,
    "qwen3_5": qwen3_5_config,
    "qwen3_5_moe": qwen3_5_moe_config,
}
PIXELS = {"min_pixels": 784, "max_pixels": 130 * 784}


def processor_of(path) -> Any:
    """Of the prompts of a model, as engines have it."""
    config, tokenizer = load_hf_config(str(path)), load_tokenizer(str(path))
    return picture_processor(config, path, tokenizer=tokenizer, options=PIXELS)


def expand(processor: Any, prompt: list[int] | dict) -> tuple[Expanded, list[Picture]]:
    """A prompt with tokens in the place of its pictures, and these."""
    media, ids = {"image": [], "video": []}, prompt
    if not isinstance(prompt, list):
        media, ids = prompt["multi_modal_data"], prompt["prompt_token_ids"]
    pictures = [processor.image(image) for image in media["image"]]
    pictures += [processor.video(frames, **known) for frames, known in media["video"]]
    return processor.expand(list(ids), pictures), pictures


def prepared(path) -> list[tuple[Expanded, list[Picture]]]:
    """All PROMPTS, for a model."""
    processor = processor_of(path)
    return [expand(processor, prompt) for prompt in PROMPTS]


class Family:
    """A tiny model of a family, transformers' own, and an engine that many tests share."""

    def __init__(self, config: transformers.PretrainedConfig, folder: Path):
        self.path = picture_models.save(config, folder, seed="qwen3_vl 4")
        picture_models.save_tokenizer(self.path)
        self.oracle = picture_models.torch_model(self.path)
        self.processor = processor_of(self.path)
        self.llm = make_llm(self.path)

    @functools.cached_property
    def alone(self) -> list[list[int]]:
        """The answer to each prompt by itself, in chunks, which is that of transformers."""
        return [self.checked_answer(prompt) for prompt in PROMPTS]

    def checked_answer(self, prompt) -> list[int]:
        """The greedy answer to a prompt, whose tokens and log-probabilities are those of transformers."""
        expanded, pictures = expand(self.processor, prompt)
        params = dataclasses.replace(GREEDY, logprobs=1)
        (output,) = self.llm.generate(prompt, params, use_tqdm=False)
        (answer,) = output.outputs
        assert (output.prompt_token_ids, output.num_cached_tokens) == (expanded.token_ids, 0)
        whole = dataclasses.replace(expanded, token_ids=[*expanded.token_ids, *answer.token_ids])
        logits = picture_models.qwen_logits(self.oracle, whole, pictures)
        check_answer(answer, logits[len(expanded.token_ids) - 1 : -1], GREEDY)
        return answer.token_ids


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Callable[[str], Family]:
    """A family by name, made once."""

    @functools.cache
    def made(name: str) -> Family:
        return Family(CONFIGS[name](), tmp_path_factory.mktemp("families") / name)

    return made


@pytest.fixture(scope="module")
def family(families) -> Family:
    return families("qwen2_5_vl")


@pytest.fixture(scope="module")
def path(family) -> Path:
    return family.path


@pytest.fixture(scope="module")
def alone(family) -> list[list[int]]:
    return family.alone


def make_llm(path, **options) -> LLM:
    """Steps of 64 tokens, so that most pictures are computed in several."""
    given = {"max_model_len": 640, "mm_processor_kwargs": PIXELS, "enforce_eager": True}
    given["skip_tokenizer_init"] = False  # times between frames are text
    return checkpoints.make_llm(path, **(given | options))


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 280, length).tolist()


def seeing(before: list[int], *given, after: list[int]) -> dict:
    """A prompt with pictures (arrays) and videos (lists of frames, six of a second).

    Videos are so short that transformers 5 places what follows them as we do.
    """
    ids, images, videos = list(before), [], []
    for each in given:
        is_video = isinstance(each, list)
        (videos if is_video else images).append(each)
        ids += [START, VIDEO if is_video else IMAGE, END]
    media = {"image": images, "video": [(frames, {"fps": 6.0}) for frames in videos]}
    return {"prompt_token_ids": [*ids, *after], "multi_modal_data": media}


PROMPTS = [
    seeing(text(3, 0), pixels(300, 240), after=text(9, 1)),
    seeing(text(5, 2), pixels(28, 28), pixels(200, 500, 1), pixels(700, 56, 2), after=text(20, 3)),
    seeing(text(2, 4), [pixels(120, 90, i) for i in range(7)], after=text(3, 5)),
    seeing(text(2, 6), pixels(90, 90, 3), [pixels(60, 60, i) for i in range(3)], after=text(1, 7)),
    text(30, 8),
    text(100, 9),
]


def answers(llm: LLM, prompts=None, params=GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS if prompts is None else prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("qwen2_5_vl", "pictures"),
        ("qwen2_5_vl", "videos"),
        ("qwen3_vl", "pictures"),
        ("qwen3_vl", "videos"),
        ("qwen3_vl_moe", "pictures"),
        ("qwen3_vl_moe", "videos"),
        ("qwen3_5", "pictures"),
        ("qwen3_5", "videos"),
        ("qwen3_5_moe", "pictures"),
        ("qwen3_5_moe", "videos"),
    ],
)
def test_greedy_tokens_equal_transformers(families, name, given):
    """One picture, three, a video, a picture and a video; and text beside them."""
    found = families(name).alone
    assert [len(answer) for answer in found] == [64] * len(PROMPTS)
    assert len({tuple(answer) for answer in found}) == len(PROMPTS)
    kind = "video" if given == "videos" else "image"
    assert any(isinstance(p, dict) and p["multi_modal_data"][kind] for p in PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_pictures"), [("qwen2_5_vl", 7), ("qwen3_vl", 11)])
def test_together_cold_and_warm_they_are_answered_alike(families, name, num_pictures):
    """Qwen3-VL's videos are encoded by rows of frames, of which the second prompt with one has two."""
    alone, llm = families(name).alone, families(name).llm
    assert llm.stats().num_encoded_pictures == num_pictures
    llm.reset_prefix_cache()
    assert answers(llm) == alone
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone
    assert all(o.num_cached_tokens > len(o.prompt_token_ids) - 16 for o in outputs)
    assert llm.stats().num_encoded_pictures == num_pictures


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_ones_are_answered_alike_and_not_encoded_again(path, alone, mode):
    llm = make_llm(
        path,
        num_gpu_blocks_override=60,
        swap_space=0.01,
        preemption_mode=mode,
        enable_prefix_caching=mode == "swap",
    )
    assert answers(llm) == alone
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_encoded_pictures == 7


@pytest.mark.deep
def test_pictures_that_are_evicted_are_encoded_again_and_answered_alike(path, alone):
    """Room for the largest picture and little more."""
    row_bytes = 48 * 4
    llm = make_llm(path, mm_encoder_cache_bytes=132 * row_bytes, enable_prefix_caching=False)
    assert answers(llm) == alone
    assert answers(llm) == alone
    assert llm.stats().num_encoded_pictures > 7


@pytest.mark.slow
def test_a_conversation_about_one_picture_encodes_it_once_and_finds_the_rest(path):
    """8 turns about a picture of 1,008 patches: from the second on, nine tenths of a prompt are in the cache."""
    llm = make_llm(path, mm_processor_kwargs={"min_pixels": 784, "max_pixels": 300 * 784})
    picture = pixels(36 * 14, 28 * 14)
    history: list[int] = []
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for turn in range(8):
        history += text(6, turn)
        prompt = seeing([5], picture, after=history)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        num_tokens = len(output.prompt_token_ids)
        assert num_tokens == 1 + 2 + 252 + len(history)
        assert turn == 0 or output.num_cached_tokens >= 0.9 * num_tokens
        history += output.outputs[0].token_ids
    assert llm.stats().num_encoded_pictures == 1


@pytest.mark.slow
def test_two_pictures_of_one_size_share_nothing_of_the_cache(family):
    first, second = (seeing([7] * 3, pixels(100, 100, seed), after=[8] * 9) for seed in (10, 11))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    a, b = (family.llm.generate(p, params, use_tqdm=False)[0] for p in (first, second))
    assert a.prompt_token_ids == b.prompt_token_ids
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)


@pytest.mark.slow
def test_several_continuations_and_beams_see_the_picture(family):
    llm = family.llm
    params = SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=6)
    (together,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (again,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in again.outputs]
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    found = [llm.beam_search(prompt, beams)[0].sequences[0].tokens for prompt in PROMPTS[:2]]
    llm.reset_prefix_cache()
    assert [llm.beam_search(p, beams)[0].sequences[0].tokens for p in PROMPTS[:2]] == found


@pytest.mark.slow
def test_two_devices_answer_as_one(path, alone):
    llm = make_llm(path, tensor_parallel_size=2)
    assert answers(llm, PROMPTS[:2]) == alone[:2]


@pytest.mark.slow
def test_programs_are_compiled_before_copy_no_cache_and_a_recorded_run_repeats(
    path, alone, tmp_path
):
    file = tmp_path / "run.calls"
    llm = make_llm(
        path,
        enforce_eager=False,
        record_calls=str(file),
        max_model_len=400,
        mm_encoder_cache_bytes="32M",
    )
    llm.wait_until_warm()
    temporaries = {record.name: record.temp_bytes for record in llm.programs()}
    assert {name: size for name, size in temporaries.items() if size > 24 << 20} == {}
    names = [record.name for record in llm.programs() if record.name.startswith("encode")]
    assert names == ["encode P=256", "encode P=512", "encode P=1024", "encode P=2048"]
    assert answers(llm, PROMPTS[:2]) == alone[:2]
    assert llm.stats().num_recompiles == 0
    del llm
    with few_programs(), file.open("rb") as stream:
        found = replay(stream)
    assert found.num_results > 0 and found.different == ()
