"""Engines whose devices share a model that takes pictures answer as one device does, whatever else is on."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from tests import checkpoints, picture_models
from tests.end_to_end import (
    test_gemma3_pictures,
    test_gemma4_pictures,
    test_mistral3_pictures,
    test_pictures,
)
from tests.end_to_end.test_tensor_parallel import (
    NOT_OF_RECURRENT,
    PREEMPTED,
    RECURRENT,
    SIZES,
    WAYS,
    assert_happened,
    assert_same_answers,
    beams,
    has_recurrent_state,
    params,
)

# Family -> its config, and where its prompts are.
FAMILIES = {
    "qwen2_5_vl": (picture_models.qwen2_5_vl_config, test_pictures),
    "qwen3_vl": (picture_models.qwen3_vl_config, test_pictures),
    "qwen3_vl_moe": (picture_models.qwen3_vl_moe_config, test_pictures),
    "qwen3_5": (picture_models.qwen3_5_config, test_pictures),
    "qwen3_5_moe": (picture_models.qwen3_5_moe_config, test_pictures),
    "gemma3": (picture_models.gemma3_config, test_gemma3_pictures),
    "gemma4": (picture_models.gemma4_config, test_gemma4_pictures),
    "mistral3": (picture_models.mistral3_config, test_mistral3_pictures),
}
FEW_BLOCKS = 60  # for the longest prompt, its answer and little else
MAX_TOKENS = 64
SLOW = {("qwen3_vl", "plain", 4), ("qwen3_5_moe", "plain", 2)}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """A family's checkpoint, made once."""

    @functools.cache
    def path(family: str) -> Path:
        folder = tmp_path_factory.mktemp("families") / family
        picture_models.save(FAMILIES[family][0](), folder, seed="qwen3_vl 4")
        picture_models.save_tokenizer(folder)
        return folder

    return path


def all_answers(family: str, path: Path, way: str, **options) -> list[checkpoints.Answer]:
    """Of prompts that are answered together, and of a beam search."""
    module, options = FAMILIES[family][1], WAYS[way] | options
    if way in PREEMPTED:
        options["num_gpu_blocks_override"] = FEW_BLOCKS
    llm = module.make_llm(path, **options)
    never = dict.fromkeys(module.NEVER, -100.0)
    more = {"logit_bias": never, "max_tokens": MAX_TOKENS}
    chosen = [params(i, **more) for i in range(len(module.PROMPTS))]
    found = checkpoints.answers(llm, module.PROMPTS, chosen)
    is_recurrent = has_recurrent_state(llm)
    found += [] if is_recurrent else beams(llm, module.PROMPTS[:1])
    assert_happened(way, llm.stats(), has_cache=not is_recurrent)
    return found


@functools.lru_cache(maxsize=1)
def answers_of_one(family: str, path: Path, way: str) -> list[checkpoints.Answer]:
    """Of one device, kept for all numbers of devices that are compared with it."""
    return all_answers(family, path, way)


def cases():
    for case in itertools.product(FAMILIES, WAYS, SIZES):
        if case[0] in RECURRENT and case[1] in NOT_OF_RECURRENT:
            continue
        marks = pytest.mark.slow if case in SLOW else pytest.mark.deep
        yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("family", "way", "num_devices"), list(cases()))
def test_tokens_are_those_of_one_device(family, way, num_devices, path_of):
    path = path_of(family)
    several = all_answers(family, path, way, tensor_parallel_size=num_devices)
    one = answers_of_one(family, path, way)
    assert_same_answers(several, one, way)
