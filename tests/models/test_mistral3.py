"""Mistral Small 3.1 and 3.2 and Ministral 3, which are released as models for pictures and text: the text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage import SamplingParams
from jaxpage.models.registry import build
from jaxpage.weights.convert import convert
from jaxpage.weights.load import load
from jaxpage.weights.save import save
from jaxpage.weights.spec import variables
from tests import checkpoints, picture_models
from tests.dense_families import DEFAULT, YARN, growing
from tests.models import test_families as families
from tests.quantized_checkpoints import Format, write, write_float
from tests.quantized_checkpoints.float8 import float8

TEXTS = {
    "mistral": {"rope_parameters": DEFAULT, "sliding_window": None},
    "ministral3": {"rope_parameters": growing(YARN, 0.2, 32), "tie_word_embeddings": True},
}


def config(kind: str, **text: Any) -> transformers.PretrainedConfig:
    tower = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    sizes = checkpoints.SMALL | checkpoints.shape(4, 2, head_dim=12)
    text = {"model_type": kind} | sizes | TEXTS[kind] | text
    tied = bool(text.get("tie_word_embeddings"))
    return transformers.Mistral3Config(
        text_config=text, vision_config=tower, tie_word_embeddings=tied
    )


@pytest.fixture(params=TEXTS)
def path(request, tmp_path) -> Path:
    return picture_models.save(config(request.param), tmp_path / "mistral3", seed=request.param)


def renamed(path: Path, target: Path, rename: Any) -> Path:
    """A checkpoint whose tensors have other names."""
    target.mkdir()
    stored = load_file(path / "model.safetensors")
    renamed = {rename(name): array for name, array in stored.items()}
    save_file(renamed, target / "model.safetensors")
    (target / "config.json").write_text((path / "config.json").read_text())
    return target


def newer(name: str) -> str:
    """As transformers 5 has them in memory."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return f"model.{name.replace('language_model.model.', 'language_model.')}"


@pytest.mark.slow
def test_logits_of_text_are_those_of_transformers(path, tmp_path):
    token_ids = families.tokens(1, 150)
    with torch.no_grad():
        expected = picture_models.torch_model(path)(torch.tensor(token_ids)).logits.numpy()
    assert families.rms(expected) > 1
    found = families.logits(families.loaded(path), token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    # Both ways in which transformers has named tensors.
    assert "language_model.model.norm.weight" in load_file(path / "model.safetensors")
    other = renamed(path, tmp_path / "other", newer)
    np.testing.assert_array_equal(families.logits(families.loaded(other), token_ids), found)


def static_fp8(layer: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As Ministral 3 is released: a scale for each layer, and one of its inputs, which is not used."""
    values, scales, meaning = float8(weight, weight.shape, np.float32)
    scale = {
        "weight_scale_inv": scales.reshape(()),
        "activation_scale": np.float32(0.5).reshape(()),
    }
    return {"weight": values, **scale}, meaning


@pytest.mark.slow
def test_text_of_an_fp8_checkpoint(tmp_path):
    """The same with the vision tower as without, where pictures are refused."""

    def quantization(kept: list[str]) -> dict[str, Any]:
        scheme = {"activation_scheme": "static", "weight_block_size": None}
        return {"quant_method": "fp8", **scheme, "modules_to_not_convert": kept}

    source = picture_models.save(config("ministral3"), tmp_path / "source", seed="fp8")
    kept = ["lm_head", "vision_tower", "multi_modal_projector"]
    form = Format("static", static_fp8, quantization)
    written = write(source, tmp_path / "fp8", form, ignore=kept)
    write_float(source, tmp_path / "floats", written)
    llm = checkpoints.make_llm(tmp_path / "fp8", enforce_eager=True)
    text_alone = {"enforce_eager": True, "limit_mm_per_prompt": {"image": 0}}
    floats = checkpoints.make_llm(tmp_path / "floats", **text_alone)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompts = [[5, 9, 3], list(range(3, 43))]
    got, expected = (checkpoints.answers(each, prompts, params) for each in (llm, floats))
    checkpoints.assert_same_answers(got, expected, atol=1e-4)
    assert sum(path.endswith("scale") for path in llm._memory._variables) == 8
    of_tower = [
        [path for path in each._memory._variables if path.startswith("visual.")]
        for each in (llm, floats)
    ]
    assert len(of_tower[0]) > 9 and not of_tower[1]
    seeing = {
        "prompt_token_ids": [5],
        "multi_modal_data": {"image": np.zeros((28, 28, 3), "uint8")},
    }
    with pytest.raises(ValueError, match="not for this model, which takes text only"):
        floats.generate(seeing, use_tqdm=False)


def test_the_text_part_says_whether_embeddings_are_tied(tmp_path):
    """transformers' own option is true in checkpoints that do not say so, and have a head."""
    made = config("mistral")
    made.tie_word_embeddings = True
    made.architectures = ["Mistral3ForConditionalGeneration"]
    assert build(made, dtype="float32").lm_head is not None
    made.text_config.tie_word_embeddings = True
    assert build(made, dtype="float32").lm_head is None


def test_what_cannot_be_served_is_refused():
    made = config("mistral")
    made.architectures = ["Mistral3ForConditionalGeneration"]
    made.text_config.model_type = "llama"
    with pytest.raises(ValueError, match="model_type 'llama'; supported are mistral, ministral3"):
        build(made, dtype="float32")
    made = config("ministral3")
    made.architectures = ["Mistral3ForConditionalGeneration"]
    del made.text_config.rope_parameters["original_max_position_embeddings"]
    made.text_config.rope_parameters["rope_type"] = "default"
    with pytest.raises(ValueError, match="llama_4_scaling_beta needs original_max_position"):
        build(made, dtype="float32")


def test_only_the_text_part_can_be_converted(tmp_path):
    path = picture_models.save(config("mistral"), tmp_path / "mistral3", seed="convert")
    with pytest.raises(ValueError, match="only the text part of it can be converted"):
        convert(path, tmp_path / "orbax")
    model = build(checkpoints.config(path), dtype="float32", pictures=False)
    assert load(model, path, use_tqdm=False).config.vision is None


def test_what_was_saved_is_loaded_with_its_encoder(tmp_path):
    path = picture_models.save(config("mistral"), tmp_path / "mistral3", seed="saved")
    model = build(checkpoints.config(path), dtype="float32")
    stored = variables(load(model, path, use_tqdm=False))
    save(model, tmp_path / "saved", files=path, format="safetensors")
    again = build(checkpoints.config(tmp_path / "saved"), dtype="float32")
    found = variables(load(again, tmp_path / "saved", use_tqdm=False))
    assert found.keys() == stored.keys()
    assert sum(name.startswith("visual.") for name in found) == 15
    for name, variable in found.items():
        np.testing.assert_array_equal(variable.get_value(), stored[name].get_value())
