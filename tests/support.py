"""What is tested for which model family: the table in `jaxpage/README.md`, read from the parameters of the tests.

`python -m tests.support` prints the table. A family is a line of FAMILIES, a feature a line of FEATURES; a cell follows
from the families that the feature's tests have among their parameters.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

# The families' names in tests -> in the table.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "granite": "Granite 3",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "cohere": "Cohere (Command R)",
    "cohere2": "Cohere 2 (Command R7B)",
    "glm4": "GLM-4-0414 (`Glm4ForCausalLM`)",
    "glm": "GLM-4 (`GlmForCausalLM`)",
    "starcoder2": "StarCoder 2",
    "nemotron": "Nemotron",
    "gpt_neox": "GPT-NeoX (Pythia)",
    "gpt2": "GPT-2",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "exaone4": "EXAONE 4",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5, without experts",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "glm4_moe": "GLM-4.5, 4.6 (`Glm4MoeForCausalLM`)",
    "glm4_moe_lite": "GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`)",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE 4.5, with experts",
    "minimax_m2": "MiniMax-M2",
    "granitemoe": "Granite 3 with experts",
    "gpt_oss": "gpt-oss",
    "gemma4": "Gemma 4 (text), without experts",
    "gemma4_moe": "Gemma 4 (text), with experts",
    "qwen3_5": "Qwen3.5 (text), without experts",
    "qwen3_5_moe": "Qwen3.5 (text), with experts",
    "qwen3_next": "Qwen3-Next",
    "granite_hybrid": "Granite 4, without experts",
    "granite_hybrid_moe": "Granite 4, with experts",
    "nemotron_h": "Nemotron-H, without experts",
    "nemotron_h_moe": "Nemotron-H (Nemotron 3), with experts",
    "lfm2": "LFM2, without experts",
    "lfm2_moe": "LFM2, with experts",
    "falcon_h1": "Falcon-H1",
}
# The same of families that take pictures.
PICTURE_FAMILIES = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 with experts",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "mistral3": "Mistral Small 3.1, 3.2, Ministral 3",
}
_DENSE = "tests.end_to_end.test_dense_families"
_EXPERTS = "tests.end_to_end.test_experts"
_SHARED = "tests.end_to_end.test_tensor_parallel:test_tokens_are_those_of_one_device"
# The columns: "module:test"s, or of those with many kinds of cases only the ones with a parameter, "module:test=value".
FEATURES: dict[str, tuple[str, ...]] = {
    "logits": (
        "tests.models.test_families:test_float32_logits_equal_transformers",
        "tests.models.test_experts:test_float32_logits_equal_transformers",
        f"{_DENSE}:test_float32_logits_equal_transformers",
    ),
    "tokens": (
        "tests.end_to_end.test_parity:test_greedy_tokens_equal_transformers",
        f"{_EXPERTS}:test_greedy_tokens_equal_transformers",
        f"{_DENSE}:test_greedy_tokens_equal_transformers",
    ),
    "bfloat16": (
        "tests.models.test_families:test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch",
        "tests.models.test_experts:test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch",
        f"{_DENSE}:test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch",
    ),
    "gradients": (
        "tests.models.test_families:test_gradient_is_finite_and_equals_a_finite_difference",
        "tests.models.test_experts:test_a_trainer_can_differentiate_the_model",
        f"{_DENSE}:test_gradient_is_finite_and_equals_a_finite_difference",
    ),
    "several devices": (f"{_SHARED}=plain",),
    "int8 weights": (f"{_SHARED}=int8 weights",),
    "int8 KV": (f"{_SHARED}=quantised pool",),
}
_SEEN = "tests.models.test_qwen_vl"
_OTHERS_SEEN = tuple(
    f"tests.models.test_{family}_pictures" for family in ("gemma3", "gemma4", "mistral3")
)
_TOKENS_SEEN = tuple(
    f"tests.end_to_end.test_{family}pictures:test_greedy_tokens_equal_transformers"
    for family in ("", "gemma3_", "gemma4_", "mistral3_")
)
PICTURE_FEATURES: dict[str, tuple[str, ...]] = {
    "embeddings of pictures": tuple(
        f"{module}:test_embeddings_of_a_picture_are_those_of_transformers"
        for module in (_SEEN, *_OTHERS_SEEN)
    ),
    "of videos": (f"{_SEEN}:test_embeddings_of_a_video_are_those_of_transformers",),
    "logits": tuple(
        f"{module}:test_logits_are_those_of_transformers" for module in (_SEEN, *_OTHERS_SEEN)
    ),
    "tokens with pictures": tuple(f"{test}=pictures" for test in _TOKENS_SEEN),
    "with videos": tuple(f"{test}=videos" for test in _TOKENS_SEEN),
    "several devices": (
        "tests.end_to_end.test_tensor_parallel_pictures:test_tokens_are_those_of_one_device=plain",
    ),
}


def table() -> str:
    """Markdown: a row for each family, a column for each feature."""
    return _table(FAMILIES, FEATURES)


def picture_table() -> str:
    """The same of families that take pictures."""
    return _table(PICTURE_FAMILIES, PICTURE_FEATURES)


def _table(families: dict[str, str], features: dict[str, tuple[str, ...]]) -> str:
    columns = {feature: tested(tests) for feature, tests in features.items()}
    lines = [["family", *features], ["---", *[":-:"] * len(features)]]
    for family, name in families.items():
        lines.append([name, *("✓" if family in found else "" for found in columns.values())])
    return "\n".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines
    )


@functools.cache
def tested_families(feature: str) -> frozenset[str]:
    """The families for which some test of the feature has a case."""
    return tested(FEATURES[feature])


def tested(tests: tuple[str, ...]) -> frozenset[str]:
    """The families that tests, written as in FEATURES, have cases of."""
    return frozenset(family for test in tests for family in _families_of(test))


def _families_of(test: str) -> Iterator[str]:
    where, _, kind = test.partition("=")
    module, _, name = where.partition(":")
    function: Any = getattr(importlib.import_module(module), name)
    cases = [mark.args[1] for mark in function.pytestmark if mark.name == "parametrize"]
    for case in (case for each in cases for case in each):
        values = tuple(_flat(case.values if isinstance(case, type(pytest.param())) else (case,)))
        if not kind or kind in values:
            yield str(values[0])


def _flat(values: Any) -> Iterator[Any]:
    """A case may be a tuple of several parameters."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


if __name__ == "__main__":
    print(f"{table()}\n\n{picture_table()}")
