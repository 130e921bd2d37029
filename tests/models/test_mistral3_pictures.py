"""Mistral 3 with pictures: the encoder and the dense call, against transformers' torch model; what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import build, picture_processor
from jaxpage.tokenizer import load_tokenizer
from jaxpage.weights.load import load
from tests import picture_models
from tests.picture_models import (
    MISTRAL_IMAGE,
    mistral3_config,
    mistral3_logits,
    mistral3_values,
    pixels,
)

PADDED = 512  # patches
# Mistral Small's decoder, and that of Ministral 3.
TEXTS = {
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_parameters": None},
    "ministral3": {},
}


@pytest.fixture(scope="module", params=TEXTS)
def loaded(request, tmp_path_factory) -> SimpleNamespace:
    """A checkpoint, torch's model of it, ours, and pictures of several proportions."""
    config = mistral3_config(text=TEXTS[request.param])
    # Released ones have no biases.
    config.multimodal_projector_bias = request.param == "ministral3"
    path = picture_models.save(config, tmp_path_factory.mktemp("mistral3"), seed=request.param)
    picture_models.save_tokenizer(path)
    hf_config = load_hf_config(str(path))
    processor = picture_processor(
        hf_config,
        path,
        tokenizer=load_tokenizer(str(path)),
        options={"size": {"longest_edge": 120}},
    )
    assert processor is not None
    sizes = [(90, 150), (300, 40), (10, 12)]
    pictures = [processor.image(pixels(*size, seed=i)) for i, size in enumerate(sizes)]
    model = load(build(hf_config, dtype="float32"), path, use_tqdm=False)
    oracle = picture_models.torch_model(path)
    return SimpleNamespace(
        path=path, oracle=oracle, model=model, processor=processor, pictures=pictures
    )


def encoded(loaded, picture, padded_patches: int = PADDED) -> np.ndarray:
    inputs = loaded.model.config.vision.encoder_inputs(picture, padded_patches)
    found = jax.jit(lambda inputs: loaded.model.visual(**inputs))(inputs)
    return np.asarray(found)[: picture.num_embeddings]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("mistral3", 3)])
def test_embeddings_of_a_picture_are_those_of_transformers(loaded, name, number):
    """Whatever the padding, and whatever is encoded beside it there."""
    import torch

    config, own = loaded.model.config.vision, loaded.pictures[:number]
    with torch.no_grad():
        given = mistral3_values(config, own)
        expected = loaded.oracle.model.get_image_features(**given).pooler_output
    for picture, wanted in zip(own, expected, strict=True):
        wanted = wanted.numpy()
        assert wanted.std() > 0.3 and len(wanted) == picture.num_embeddings
        for padded in (len(picture.patches), PADDED):
            found = encoded(loaded, picture, padded)
            np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("mistral3", 1), ("mistral3", 3)])
def test_logits_are_those_of_transformers(loaded, name, number):
    own = loaded.pictures[:number]
    prompt = loaded.processor.expand([5, 6, *[MISTRAL_IMAGE, 7, 8] * number, 9], own)
    expected = mistral3_logits(loaded.oracle, loaded.model.config.vision, prompt.token_ids, own)
    embeds = np.zeros((len(prompt.token_ids), 48), np.float32)
    is_embed = np.array(prompt.token_ids) == MISTRAL_IMAGE
    embeds[is_embed] = np.concatenate([encoded(loaded, picture) for picture in own])
    positions = jnp.arange(len(embeds), dtype=jnp.int32)
    inputs = ForwardInput(
        token_ids=jnp.array(prompt.token_ids, jnp.int32),
        positions=positions,
        attention=DenseAttention(positions),
        embeds=jnp.array(embeds),
        is_embed=jnp.array(is_embed),
    )
    found = np.asarray(loaded.model.logits(loaded.model.hidden_states(inputs)))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_layer_that_is_told_feeds_the_projector(tmp_path):
    """Counted from either end, alone or in a list. Its layers after that are loaded too."""
    import torch

    config = mistral3_config()
    picture_models.save(config, tmp_path, seed="layers")
    oracle, hf_config = picture_models.torch_model(tmp_path), load_hf_config(str(tmp_path))
    processor = picture_processor(hf_config, tmp_path)
    assert processor is not None
    picture = processor.image(pixels(30, 40))
    for told in (-1, -2, 1, [0], [-3]):
        hf_config.vision_feature_layer = told
        model = load(build(hf_config, dtype="float32"), tmp_path, use_tqdm=False)
        given = mistral3_values(model.config.vision, [picture])
        with torch.no_grad():
            expected = oracle.model.get_image_features(**given, vision_feature_layer=told)
        inputs = model.config.vision.encoder_inputs(picture, len(picture.patches))
        found = np.asarray(model.visual(**inputs))
        wanted = expected.pooler_output[0].numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is \[-1, -2\]; supported is"),
        ({"vision_feature_layer": 4}, "vision_feature_layer is 4; .* a number from -4 to 3"),
        ({"projector_hidden_act": "mish"}, "projector_hidden_act is 'mish'; supported are silu"),
        ({"vision_config": {"hidden_act": "mish"}}, "the vision tower: activation 'mish'"),
        ({"vision_config": {"num_attention_heads": 16}}, "16 heads for hidden_size 32; .*of 4"),
        ({"vision_config": {"num_channels": 1}}, "has 1 channels; supported are 3"),
        ({"vision_config": {"patch_size": [6, 6]}}, r"patch_size of the .* is \[6, 6\] in config"),
        ({"vision_config": {"image_size": 0}}, "image_size of the .* is 0 in config.json; it must"),
        ({"vision_config": {"num_attention_heads": 0}}, "num_attention_heads of the .* is 0 in"),
        (
            {"vision_config": {"rope_parameters": {"rope_theta": 0}}},
            "rope_theta .* must be above 0",
        ),
        ({"spatial_merge_size": 0}, "spatial_merge_size of the .* is 0 in config.json; it must"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "supported is pixtral"),
    ],
)
def test_towers_that_are_refused(changes: dict[str, Any], message):
    config = mistral3_config()
    config.architectures = ["Mistral3ForConditionalGeneration"]
    for name, value in changes.items():
        if name == "vision_config":
            for inner, changed in value.items():
                # What a class does not allow to be set.
                config.vision_config.__dict__[inner] = changed
        else:
            config.__dict__[name] = value
    with pytest.raises(ValueError, match=message):
        build(config, dtype="float32")
