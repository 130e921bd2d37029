"""Tiny Hugging Face checkpoints of every family, made by transformers and torch, torch's own answers to them, and an
engine of their size.

Random and seeded. transformers initialises with a standard deviation of 0.02, which leaves logits
almost flat; here weights, norms and biases are spread wider, so that a mistake anywhere shows.
"""

from __future__ import annotations

import copy
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from jaxpage import LLM, SamplingParams
from tests.few_programs import few_programs

_DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _longrope(half: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(half)],
        "long_factor": [1.5 + 0.7 * i for i in range(half)],
    }


def shape(heads: int, kv_heads: int, *, layers: int = 2, hidden: int = 32, **other: Any) -> dict:
    """Arguments of a config: its heads and sizes, and `other` as they are."""
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        **other,
    }


# family -> arguments of its transformers config.
# They differ in heads, head dim, tying, RoPE, windows, biases.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        shape(4, 2, rope_parameters=_DEFAULT),
        shape(4, 4, head_dim=16, tie_word_embeddings=True, rope_parameters=_LLAMA3),
        shape(
            8,
            1,
            layers=3,
            hidden=64,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=_DEFAULT | {"rope_type": "linear", "factor": 2.5},
        ),
        shape(
            6,
            3,
            hidden=48,
            head_dim=12,
            max_position_embeddings=200,
            rope_parameters=_DEFAULT | {"rope_type": "dynamic", "factor": 3.0},
        ),
        shape(4, 2, rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    ],
    "mistral": [
        shape(4, 2, sliding_window=7, rope_parameters=_DEFAULT),
        shape(4, 1, head_dim=24, sliding_window=None, rope_parameters=_DEFAULT),
        shape(
            8,
            4,
            hidden=64,
            layers=3,
            sliding_window=64,
            tie_word_embeddings=True,
            rope_parameters=_YARN | {"truncate": False},
        ),
    ],
    "qwen2": [
        shape(4, 2, tie_word_embeddings=True, rope_parameters=_DEFAULT),
        shape(
            6,
            3,
            hidden=48,
            layers=4,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            rope_parameters=_DEFAULT,
        ),
        shape(4, 4, rope_parameters=_YARN | {"attention_factor": 1.2}),
    ],
    "qwen3": [
        shape(4, 2, head_dim=16, tie_word_embeddings=True, rope_parameters=_DEFAULT),
        shape(8, 2, hidden=64, head_dim=8, attention_bias=True, rope_parameters=_YARN),
        shape(
            4,
            4,
            layers=3,
            head_dim=20,
            use_sliding_window=True,
            sliding_window=10,
            max_window_layers=1,
            rope_parameters=_LLAMA3,
        ),
    ],
    "phi3": [
        shape(4, 2, rope_parameters=_DEFAULT),
        shape(
            4,
            4,
            sliding_window=9,
            tie_word_embeddings=True,
            rope_parameters=_DEFAULT | {"partial_rotary_factor": 0.5},
        ),
        shape(
            4,
            1,
            hidden=64,
            layers=3,
            max_position_embeddings=512,
            original_max_position_embeddings=128,
            rope_parameters=_longrope(6) | {"partial_rotary_factor": 0.75},
        ),
    ],
    "gemma2": [
        shape(4, 2, head_dim=8, query_pre_attn_scalar=8, sliding_window=12),
        shape(
            4,
            4,
            head_dim=16,
            layers=3,
            query_pre_attn_scalar=24,
            sliding_window=40,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            attention_bias=True,
            rope_parameters=_DEFAULT | {"rope_type": "linear", "factor": 2.0},
        ),
        shape(
            8,
            1,
            hidden=64,
            head_dim=16,
            tie_word_embeddings=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            layer_types=[_FULL, _SLIDING],
            sliding_window=5,
        ),
    ],
    "gemma3": [
        shape(
            4, 2, head_dim=8, layers=3, layer_types=[_SLIDING, _SLIDING, _FULL], sliding_window=8
        ),
        shape(
            4,
            1,
            head_dim=16,
            layer_types=[_SLIDING, _FULL],
            sliding_window=20,
            query_pre_attn_scalar=16,
            rope_parameters={
                _FULL: _DEFAULT | {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                _SLIDING: _DEFAULT,
            },
        ),
        shape(
            8,
            4,
            hidden=64,
            head_dim=12,
            layer_types=[_FULL, _SLIDING],
            sliding_window=33,
            tie_word_embeddings=False,
            final_logit_softcapping=4.0,
            attention_bias=True,
        ),
    ],
}
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
CASES = [
    (family, variant) for family, variants in VARIANTS.items() for variant in range(len(variants))
]
VOCAB_SIZE = 250
# What all variants have.
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 72,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(family: str, variant: int, path: str | Path, **overrides: Any) -> Path:
    """Write variant `variant` of `family` (float32) to the folder `path`; `overrides` go to its
    config. Returns `path`.
    """
    config_name, _ = _CLASSES[family]
    chosen = VARIANTS[family][variant] | overrides
    return build_from(config_name, chosen, path, seed=f"{family} {variant}")


def build_from(config_name: str, chosen: dict[str, Any], path: str | Path, *, seed: str) -> Path:
    """The same of a transformers config by name and its arguments."""
    # A copy: transformers writes defaults into the dicts it is given.
    arguments = SMALL | copy.deepcopy(chosen)
    return save(getattr(transformers, config_name)(**arguments), path, seed=seed)


def save(config: transformers.PretrainedConfig, path: str | Path, *, seed: str) -> Path:
    """Write a random model of any transformers config."""
    import torch  # here and below, so that tests of engines without an oracle run where there is no torch

    torch.manual_seed(zlib.crc32(seed.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name or ".ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed_tokens" in name:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        for module in model.modules():
            if type(module).__name__.endswith("LayerNorm1P"):  # it adds 1 itself
                module.weight.sub_(1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4's
                buffer.uniform_(0.6, 1.2)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.3)
    model.save_pretrained(path)
    return Path(path)


def config(path: str | Path) -> transformers.PretrainedConfig:
    """The transformers config of a checkpoint."""
    return transformers.AutoConfig.from_pretrained(path)


def torch_logits(path: str | Path, token_ids: np.ndarray, *, dtype: str = "float32") -> np.ndarray:
    """float32[B, T, V]: the answer of transformers to int[B, T] tokens, computed in `dtype` with
    eager attention.
    """
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor(token_ids)).logits.float().numpy()


# Engines with small blocks and chunks and little room: the same in several files, so that they share programs.
TIGHT = {
    "block_size": 4,
    "num_gpu_blocks_override": 93,
    "max_model_len": 368,
    "max_num_batched_tokens": 16,
}


def make_llm(path: str | Path, *, all_programs: bool = False, **options: Any) -> LLM:
    """An engine of a tiny checkpoint that is exact and soon there. `options` come on top."""
    small = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    with nullcontext() if all_programs else few_programs():
        return LLM(str(path), **(small | options))


Answer = tuple[list[int], list[float]]  # token ids, and the log-probability of each


def answers(
    llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams]
) -> list[Answer]:
    """Of all sequences, those of a prompt one after the other. `params` ask for logprobs."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            list(c.token_ids),
            [row[t].logprob for row, t in zip(c.logprobs, c.token_ids, strict=True)],
        )
        for output in outputs
        for c in output.outputs
        if c.logprobs is not None
    ]


def assert_same_answers(got: list[Answer], expected: list[Answer], *, atol: float) -> None:
    """The same tokens, and log-probabilities that differ by no more than `atol`."""
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)
