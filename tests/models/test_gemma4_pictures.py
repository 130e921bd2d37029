"""Gemma 4 with pictures: patches, prompts, and the dense call, against transformers' processor and torch model."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import build, picture_processor
from jaxpage.pictures.gemma4 import gemma4_processor
from jaxpage.pictures.settings import ProcessorSettings
from jaxpage.weights.load import load
from tests import picture_models
from tests.picture_models import (
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_IMAGE,
    gemma4_config,
    gemma4_logits,
    gemma4_values,
    pixels,
)

KINDS = {"gemma4": False, "gemma4 that sees ahead": True}


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory) -> SimpleNamespace:
    """A checkpoint, torch's model of it, ours, and pictures of several proportions."""
    config = gemma4_config(sees_ahead=KINDS[request.param])
    path = picture_models.save(config, tmp_path_factory.mktemp("gemma4"), seed=request.param)
    hf_config = load_hf_config(str(path))
    processor = picture_processor(hf_config, path, options={"max_soft_tokens": 70})
    assert processor is not None
    sizes = [(90, 150), (300, 40), (64, 64)]
    pictures = [processor.image(pixels(*size, seed=i)) for i, size in enumerate(sizes)]
    model = load(build(hf_config, dtype="float32"), path, use_tqdm=False)
    oracle = picture_models.torch_model(path)
    return SimpleNamespace(
        path=path, oracle=oracle, model=model, processor=processor, pictures=pictures
    )


def encoded(loaded, picture, padded_patches: int = 720) -> np.ndarray:
    inputs = loaded.model.config.vision.encoder_inputs(picture, padded_patches)
    found = jax.jit(lambda inputs: loaded.model.visual(**inputs))(inputs)
    return np.asarray(found)[: picture.num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("gemma4", 3)])
def test_embeddings_of_a_picture_are_those_of_transformers(loaded, name, number):
    """Whatever the padding."""
    import torch

    for picture in loaded.pictures[:number]:
        with torch.no_grad():
            given = gemma4_values(loaded.model.config.vision, [picture])
            expected = loaded.oracle.model.get_image_features(**given).pooler_output[0].numpy()
        assert expected.std() > 0.3 and len(expected) == picture.num_tokens
        for padded in (len(picture.patches), 720):
            found = encoded(loaded, picture, padded)
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("gemma4", 1), ("gemma4", 3)])
def test_logits_are_those_of_transformers(loaded, name, number):
    own = loaded.pictures[:number]
    prompt = loaded.processor.expand([5, 6, *[GEMMA_IMAGE, 7, 8] * number, 9], own)
    expected = gemma4_logits(loaded.oracle, loaded.model.config.vision, prompt.token_ids, own)
    size = len(prompt.token_ids)
    embeds, of_picture = np.zeros((size, 32), np.float32), np.full(size, -1, np.int32)
    for index, ((first, length), picture) in enumerate(zip(prompt.spans, own, strict=True)):
        embeds[first : first + length] = encoded(loaded, picture)
        of_picture[first : first + length] = index
    positions = jnp.arange(size, dtype=jnp.int32)
    sees_ahead = loaded.model.config.vision.bidirectional
    inputs = ForwardInput(
        token_ids=jnp.array(prompt.token_ids, jnp.int32),
        positions=positions,
        attention=DenseAttention(
            positions,
            jnp.array(of_picture) if sees_ahead else None,
            causal_without_window=True,
        ),
        embeds=jnp.array(embeds),
        is_embed=jnp.array(of_picture >= 0),
    )
    found = np.asarray(loaded.model.logits(loaded.model.hidden_states(inputs)))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def processor_of(most: int = 70, **vision):
    settings = ProcessorSettings(image={"max_soft_tokens": most}, video={})
    return gemma4_processor(gemma4_config(vision=vision), settings)


@pytest.mark.parametrize(
    ("height", "width"), [(90, 150), (1, 1), (3000, 10), (10, 3000), (1200, 1200), (17, 400)]
)
@pytest.mark.parametrize("most", [70, 280])
def test_patches_are_those_of_transformers(height, width, most):
    """The same values, in the order in which they are pooled."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    theirs = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=most)
    array = pixels(height, width)
    given = theirs(images=[array.transpose(2, 0, 1)], input_data_format="channels_first")
    processor = processor_of(most, position_embedding_size=1024)
    picture = processor.image(array)
    assert picture.num_tokens == given["num_soft_tokens_per_image"][0]
    values, places = given["pixel_values"][0], given["image_position_ids"][0]
    order = {tuple(place): i for i, place in enumerate(places.tolist()) if place[0] >= 0}
    own = processor.config.places(picture.grid).T.tolist()
    assert sorted(map(tuple, own)) == sorted(order)
    raster = np.stack([values[order[tuple(place)]] for place in own])
    np.testing.assert_allclose(picture.patches, 2 * (raster - 0.5), atol=1e-6)


def test_placeholders_get_begin_and_end():
    processor = processor_of()
    first, second = (processor.image(pixels(*size)) for size in ((90, 150), (64, 64)))
    full = [
        *[4, GEMMA_BEGIN, *[GEMMA_IMAGE] * first.num_tokens, GEMMA_END, 5],
        *[GEMMA_BEGIN, *[GEMMA_IMAGE] * second.num_tokens, GEMMA_END],
    ]
    spans = ((2, first.num_tokens), (5 + first.num_tokens, second.num_tokens))
    for ids in (
        [4, GEMMA_IMAGE, 5, GEMMA_IMAGE],
        [4, GEMMA_BEGIN, GEMMA_IMAGE, GEMMA_END, 5, GEMMA_BEGIN, GEMMA_IMAGE, GEMMA_END],
        full,
    ):
        expanded = processor.expand(ids, [first, second])
        assert (expanded.token_ids, expanded.spans) == (full, spans)
    with pytest.raises(ValueError, match="has 1 placeholders"):
        processor.expand([GEMMA_IMAGE], [first, second])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100; it must be one of"),
        ({"max_pixels": 3}, "max_pixels unknown; known is max_soft_tokens"),
    ],
)
def test_options_that_are_refused(options, message):
    settings = ProcessorSettings(image={}, video={})
    with pytest.raises(ValueError, match=message):
        gemma4_processor(gemma4_config(), settings, options=options)


def test_pictures_that_are_refused():
    with pytest.raises(ValueError, match="a picture of 10x3000 pixels is 210 patches long"):
        processor_of().image(pixels(3000, 10))
    with pytest.raises(ValueError, match="give some frames as pictures"):
        processor_of().video([], fps=1.0)
