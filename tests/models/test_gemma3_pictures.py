"""Gemma 3 with pictures, in the dense call, against transformers' torch model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import build
from jaxpage.pictures.gemma3 import gemma3_processor
from jaxpage.pictures.settings import read_settings
from jaxpage.weights.load import load
from tests import picture_models
from tests.picture_models import (
    GEMMA_BEGIN,
    gemma3_config,
    gemma_logits,
    gemma_pixels,
    pixels,
)

NEWLINES = {"\n": 11, "\n\n": 12}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    return picture_models.save(gemma3_config(), folder, seed="gemma 3 with pictures")


@pytest.fixture(scope="module")
def oracle(path):
    return picture_models.torch_model(path)


@pytest.fixture(scope="module")
def model(path):
    hf_config = load_hf_config(str(path))
    return load(build(hf_config, dtype="float32"), path, use_tqdm=False)


@pytest.fixture(scope="module")
def pictures(path):
    tokenizer = type("Newlines", (), {"get_vocab": lambda self: NEWLINES})()
    hf_config = load_hf_config(str(path))
    processor = gemma3_processor(hf_config, read_settings(path), tokenizer=tokenizer)
    return processor, [processor.image(pixels(90, 150, seed=seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def encoded(model):
    program = jax.jit(lambda inputs: model.visual(**inputs))

    def embeddings(picture, padded_patches: int = 64) -> np.ndarray:
        inputs = model.config.vision.encoder_inputs(picture, padded_patches)
        return np.asarray(program(inputs))[: picture.num_tokens]

    return embeddings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("gemma3", 2)])
def test_embeddings_of_a_picture_are_those_of_transformers(oracle, pictures, encoded, name, number):
    """Whatever the padding."""
    import torch

    for picture in pictures[1][:number]:
        with torch.no_grad():
            values = torch.tensor(gemma_pixels(picture))[None]
            expected = oracle.model.get_image_features(values).pooler_output[0].numpy()
        assert expected.std() > 0.3
        for padded in (64, 80):
            found = encoded(picture, padded)
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("gemma3", 1), ("gemma3", 3)])
def test_logits_are_those_of_transformers(oracle, model, pictures, encoded, name, number):
    processor, own = pictures[0], pictures[1][:number]
    between = [GEMMA_BEGIN, 7, 8]
    prompt = processor.expand([5, 6, *between * number, 9], own)
    token_ids = np.array(prompt.token_ids)
    expected = gemma_logits(oracle, prompt.token_ids, own)

    size = len(token_ids)
    embeds, of_picture = np.zeros((size, 32), np.float32), np.full(size, -1, np.int32)
    for index, ((first, length), picture) in enumerate(zip(prompt.spans, own, strict=True)):
        embeds[first : first + length] = encoded(picture)
        of_picture[first : first + length] = index
    positions = jnp.arange(size, dtype=jnp.int32)

    inputs = ForwardInput(
        token_ids=jnp.array(token_ids),
        positions=positions,
        attention=DenseAttention(positions, jnp.array(of_picture)),
        embeds=jnp.array(embeds),
        is_embed=jnp.array(of_picture >= 0),
    )
    found = np.asarray(model.logits(model.hidden_states(inputs)))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_the_text_part_alone_has_no_tower(path):
    text = build(load_hf_config(str(path)), dtype="float32", pictures=False)
    load(text, path, use_tqdm=False)
    assert text.config.vision is None and not hasattr(text, "visual")


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [True, False])
def test_options_of_the_text_part_that_transformers_does_not_look_at(pictures, tmp_path):
    """The whole config says whether embeddings are tied, and logits are not capped."""
    config = gemma3_config()
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = False, True
    config.text_config.final_logit_softcapping = 1.0
    path = picture_models.save(config, tmp_path, seed="gemma 3 untied")
    token_ids = list(range(5, 25))
    expected = gemma_logits(picture_models.torch_model(path), token_ids, [])
    untied = build(load_hf_config(str(path)), dtype="float32", pictures=pictures)
    found = load(untied, path, use_tqdm=False)(jnp.array([token_ids]))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
