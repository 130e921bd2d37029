"""Whole engines with tiny Gemma 4 models and pictures against transformers: one that is causal everywhere, and one in
which the tokens of a picture see each other in layers with a window.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpage import LLM
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.registry import picture_processor
from tests import checkpoints, picture_answers, picture_models
from tests.picture_answers import checked_answer, greedy
from tests.picture_models import (
    GEMMA_END,
    GEMMA_IMAGE,
    gemma4_config,
    gemma4_logits,
    pixels,
)

NEVER = range(GEMMA_IMAGE, GEMMA_END + 1)  # see `greedy`
GREEDY = greedy(NEVER)
seeing = partial(picture_answers.seeing, [GEMMA_IMAGE])
OPTIONS = {"max_soft_tokens": 70}


def make_llm(path: Path, **options) -> LLM:
    """A step holds one picture and a little more."""
    given = {
        "max_model_len": 384,
        "max_num_batched_tokens": 80,
        "enforce_eager": True,
        "mm_processor_kwargs": OPTIONS,
    }
    return checkpoints.make_llm(path, **(given | options))


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 280, length).tolist()


PROMPTS = [
    seeing(text(5, 0), pixels(300, 240), text(9, 1)),
    seeing(text(5, 2), pixels(28, 28), text(3, 3), pixels(200, 500, 1), text(20, 4)),
    seeing(text(30, 5), pixels(90, 90, 3)),
    text(30, 6),
    text(100, 7),
]


@pytest.fixture(scope="module", params=["gemma4", "gemma4 that sees ahead"])
def loaded(request, tmp_path_factory) -> SimpleNamespace:
    sees_ahead = request.param != "gemma4"
    folder = tmp_path_factory.mktemp("gemma4") / "checkpoint"
    path = picture_models.save(gemma4_config(sees_ahead=sees_ahead), folder, seed=request.param)
    llm = make_llm(path)
    oracle = picture_models.torch_model(path)
    processor = picture_processor(load_hf_config(str(path)), path, options=OPTIONS)
    found = SimpleNamespace(path=path, llm=llm, oracle=oracle, processor=processor)
    checked = partial(checked_answer, llm, processor, partial(gemma4_logits, oracle), GREEDY)
    found.alone = [checked(prompt) for prompt in PROMPTS]
    return found


def answers(llm: LLM, prompts=None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS if prompts is None else prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given"), [("gemma4", "pictures")])
def test_greedy_tokens_equal_transformers(loaded, name, given):
    """One picture, two in several chunks, one at the end; and text alone."""
    assert [len(answer) for answer in loaded.alone] == [64] * len(PROMPTS)
    assert len({tuple(answer) for answer in loaded.alone}) == len(PROMPTS)


@pytest.mark.slow
def test_together_cold_and_warm_they_are_answered_alike(loaded):
    llm = loaded.llm
    llm.reset_prefix_cache()
    before = llm.stats().num_encoded_pictures
    assert answers(llm) == loaded.alone
    assert answers(llm) == loaded.alone
    assert llm.stats().num_encoded_pictures == before and llm.stats().prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_ones_are_answered_alike(loaded, mode):
    llm = make_llm(
        loaded.path,
        num_gpu_blocks_override=90,
        swap_space=0.01,
        preemption_mode=mode,
        enable_prefix_caching=mode == "swap",
    )
    assert answers(llm) == loaded.alone
    assert llm.stats().num_preemptions > 0


@pytest.mark.slow
def test_without_pictures_only_the_text_part_is_loaded(loaded):
    llm = make_llm(loaded.path, limit_mm_per_prompt={"image": 0}, mm_processor_kwargs=None)
    assert answers(llm, PROMPTS[3:]) == loaded.alone[3:]
    with pytest.raises(ValueError, match="pictures|multi_modal_data"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
