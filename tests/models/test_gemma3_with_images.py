"""Gemma 3 of 4B and more is released as a model for images and text; its text part is served."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage import SamplingParams
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from tests import checkpoints

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB_SIZE = 250


def config() -> transformers.PretrainedConfig:
    text = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=[SLIDING, SLIDING, FULL],
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.save(config(), tmp_path_factory.mktemp("gemma3"), seed="gemma3 with images")


@pytest.fixture(scope="module")
def answers(path):
    return first_tokens(path)


def renamed(path, folder, rename):
    """A copy of a checkpoint whose tensors have other names."""
    tensors = {rename(name): array for name, array in load_file(path / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((path / "config.json").read_text())
    return folder


def first_tokens(path) -> list:
    """Greedy continuations of prompts on both sides of the window, with their logprobs."""
    llm = checkpoints.make_llm(path, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    return checkpoints.answers(llm, [[5, 9, 3], list(range(3, 43))], params)


@pytest.mark.slow
def test_text_is_continued_as_by_transformers(path, answers):
    for prompt, (tokens, logprobs) in zip(([5, 9, 3], list(range(3, 43))), answers, strict=True):
        logits = checkpoints.torch_logits(path, np.array([prompt + tokens]))[0, len(prompt) - 1 :]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert tokens == logits[:-1].argmax(-1).tolist()
        found = [expected[step, token] for step, token in enumerate(tokens)]
        np.testing.assert_allclose(logprobs, found, atol=1e-4)


@pytest.mark.slow
def test_the_newer_names_of_tensors_are_read_too(path, answers, tmp_path):
    def newer(name: str) -> str:
        if name.startswith("language_model.model."):
            return "model.language_model." + name.removeprefix("language_model.model.")
        return f"model.{name}"

    assert first_tokens(renamed(path, tmp_path, newer)) == answers


def test_a_tensor_of_no_known_part_is_refused(path, tmp_path):
    def spoiled(name: str) -> str:
        return name.replace("multi_modal_projector.", "audio_tower.")

    with pytest.raises(ValueError, match="audio_tower"):
        first_tokens(renamed(path, tmp_path, spoiled))


def test_lengths_and_dtype_are_those_of_the_text_part(path, tmp_path):
    values = json.loads((path / "config.json").read_text())
    values["text_config"]["dtype"] = values.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf_config = load_hf_config(str(tmp_path))
    resolved = EngineConfig(model=str(tmp_path)).resolve(hf_config, platform="cpu")
    assert (resolved.max_model_len, resolved.dtype) == (512, "bfloat16")
