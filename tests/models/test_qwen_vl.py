"""Qwen2.5-VL and Qwen3-VL against transformers' torch models: the towers for odd sizes, logits of prompts with pictures
and videos.
"""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import build, picture_processor
from jaxpage.tokenizer import load_tokenizer
from jaxpage.weights.load import load
from jaxpage.weights.spec import specs
from tests import picture_models
from tests.aot.models import QWEN2_5_VL_3B
from tests.picture_models import END, IMAGE, START, VIDEO, pixels

pytestmark = pytest.mark.slow

CONFIGS = {
    "qwen2_5_vl": picture_models.qwen2_5_vl_config,
    "qwen3_vl": picture_models.qwen3_vl_config,
    "qwen3_vl_moe": picture_models.qwen3_vl_moe_config,
    "qwen3_5": picture_models.qwen3_5_config,
    "qwen3_5_moe": picture_models.qwen3_5_moe_config,
}
SIZES = [(28, 28), (1500, 900), (90, 1500), (300, 240)]  # height, width
LIMITS = {"min_pixels": 784, "max_pixels": 130 * 784}
PADDED = 768  # patches; one program of each family encodes everything here


class Family:
    """A tiny model of a family, transformers' own, and programs that are compiled once."""

    def __init__(self, name: str, folder):
        self.name = name
        self.path = picture_models.save(CONFIGS[name](), folder, seed=name)
        self.theirs = picture_models.torch_model(self.path)
        hf_config = load_hf_config(str(self.path))
        self.model = loaded(self.path)
        picture_models.save_tokenizer(self.path)
        tokenizer = load_tokenizer(str(self.path))
        self.processor = picture_processor(
            hf_config, self.path, tokenizer=tokenizer, options=LIMITS
        )
        self.vision = self.model.config.vision
        self._encode = jax.jit(lambda inputs: self.model.visual(**inputs))
        self._dense = jax.jit(self._logits)

    def embeddings(self, picture, padded_patches: int = PADDED) -> np.ndarray:
        """[num_tokens, embedding_size] of a picture, padded to a size."""
        inputs = self.vision.encoder_inputs(picture, padded_patches)
        return np.asarray(self._encode(inputs))[: picture.num_tokens]

    def torch_embeddings(self, picture) -> np.ndarray:
        import torch

        with torch.no_grad():
            grid = torch.tensor([picture.grid])
            found = self.theirs.model.visual(torch.tensor(picture.patches), grid)
        deep = getattr(found, "deepstack_features", None) or []
        return np.concatenate([each.numpy() for each in (found.pooler_output, *deep)], axis=-1)

    def _logits(self, token_ids, positions, embeds, is_embed):
        inputs = ForwardInput(
            token_ids=token_ids,
            positions=positions,
            attention=DenseAttention(jnp.arange(token_ids.shape[0], dtype=jnp.int32)),
            embeds=embeds,
            is_embed=is_embed,
        )
        return self.model.logits(self.model.hidden_states(inputs))

    def logits(self, prompt, pictures) -> np.ndarray:
        """float32[T, V] of the dense call."""
        size = len(prompt.token_ids)
        embeds = np.zeros((size, self.vision.embedding_size), np.float32)
        is_embed = np.zeros(size, bool)
        parts = [part for picture in pictures for part in picture.parts]
        for (first, length), picture in zip(prompt.spans, parts, strict=True):
            embeds[first : first + length] = self.embeddings(picture)
            is_embed[first : first + length] = True
        token_ids = np.array(prompt.token_ids)
        return np.asarray(self._dense(token_ids, prompt.positions, embeds, is_embed))


def loaded(path):
    return load(build(load_hf_config(str(path)), dtype="float32"), path, use_tqdm=False)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


each_family = pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], indirect=True
)


@each_family
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_embeddings_of_a_picture_are_those_of_transformers(family, size):
    picture = family.processor.image(pixels(*size))
    found, expected = family.embeddings(picture), family.torch_embeddings(picture)
    assert expected.std() > 0.3
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@each_family
def test_embeddings_of_a_video_are_those_of_transformers(family):
    video = family.processor.video([pixels(120, 250, seed=seed) for seed in range(9)], fps=2.0)
    assert video.grid[0] == 5
    expected = family.torch_embeddings(video)
    found = np.concatenate([family.embeddings(part) for part in video.parts])
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@each_family
def test_padding_changes_nothing(family):
    picture = family.processor.image(pixels(300, 240))
    num_patches = len(picture.patches)
    exact = family.embeddings(picture, num_patches)
    np.testing.assert_allclose(family.embeddings(picture), exact, atol=2e-5, rtol=0)
    for padded in (num_patches - 4, num_patches + 2):
        with pytest.raises(ValueError, match=f"cannot be padded to {padded}"):
            family.vision.encoder_inputs(picture, padded)


ONE = [5, 6, START, IMAGE, END, 7, 8, 9]
THREE = [5, START, IMAGE, END, 6, START, IMAGE, END, 7, START, IMAGE, END, 8, 9]
VIDEO_AND_PICTURE = [5, START, VIDEO, END, 6, 7, START, IMAGE, END, 9]


@each_family
@pytest.mark.parametrize(
    ("token_ids", "sizes", "num_frames"),
    [
        (ONE, [(300, 240)], 0),
        (THREE, [(28, 28), (300, 240), (90, 500)], 0),
        (VIDEO_AND_PICTURE, [(200, 150)], 5),
    ],
    ids=["one", "three", "video"],
)
def test_logits_are_those_of_transformers(family, token_ids, sizes, num_frames):
    processor = family.processor
    pictures = [processor.image(pixels(*size, seed=i)) for i, size in enumerate(sizes)]
    if num_frames:
        frames = [pixels(130, 180, seed=seed) for seed in range(num_frames)]
        pictures.append(processor.video(frames, fps=3.0))
    prompt = processor.expand(token_ids, pictures)
    expected = picture_models.qwen_logits(family.theirs, prompt, pictures)
    assert np.ptp(expected) > 5
    np.testing.assert_allclose(family.logits(prompt, pictures), expected, atol=1e-4, rtol=0)


@each_family
def test_the_other_names_of_tensors_are_read_too(family, tmp_path):
    def other(name: str) -> str:
        if name.startswith(("model.visual.", "model.language_model.")):
            return name.removeprefix("model.").replace("language_model.", "model.", 1)
        if name.startswith("visual."):
            return f"model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    stored = load_file(family.path / "model.safetensors")
    save_file({other(n): array for n, array in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((family.path / "config.json").read_text())
    found = loaded(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, family.model.visual, found.visual)
    jax.tree.map(np.testing.assert_array_equal, family.model.model, found.model)


def test_the_released_shape_has_the_parameters_that_transformers_gives_it(tmp_path):
    """What `jaxpage plan` counts, the tower's included."""
    import torch

    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    hf_config = load_hf_config(str(tmp_path))
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(hf_config)
    ours = specs(build(hf_config, dtype="bfloat16"))
    sizes = {path: math.prod(spec.shape) for path, spec in ours.items()}
    assert sum(sizes.values()) == sum(each.numel() for each in theirs.parameters())
    tower = sum(size for path, size in sizes.items() if path.startswith("visual."))
    assert tower == sum(each.numel() for each in theirs.model.visual.parameters()) > 6e8
