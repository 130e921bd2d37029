"""The demo model with pictures as a pure function of its parameters: jaxpage's own Qwen2.5-VL, and its loss.

Parameters are a dict by path, as `weights.spec.variables` names them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpage.demo.row_attention import RowAttention
from jaxpage.models import registry
from jaxpage.models.config import ModelConfig
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.qwen2_5_vl import qwen2_5_vl
from jaxpage.pictures.border import Picture
from jaxpage.weights.spec import variables

Params = dict[str, jax.Array]

VISION_START, VISION_END, IMAGE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, "<|video_pad|>")  # the last ids of the vocabulary

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [8, 8, 8],
        },
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 192,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 48,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
}
GRID = (1, 12, 12)  # patches of a picture
NUM_PATCHES, NUM_TOKENS = 144, 36


class Batch(NamedTuple):
    """Conversations, each about a picture, and the positions whose next token is a target."""

    tokens: np.ndarray  # int32[B, T]
    selected: np.ndarray  # int32[S], positions in the flattened rows
    targets: np.ndarray  # int32[S], the token after each
    weights: np.ndarray  # float32[S]; 0: padding
    positions: np.ndarray  # int32[3, B, T]
    patches: np.ndarray  # float32[B, NUM_PATCHES, values], in the encoder's order


def hf_config(vocab_size: int) -> Any:
    """The config of transformers for a vocabulary that ends with VISION_TOKENS."""
    from transformers import Qwen2_5_VLConfig

    ends = {"bos_token_id": None, "eos_token_id": None}
    text = HF_CONFIG["text_config"] | {"vocab_size": vocab_size} | ends
    settings: dict[str, Any] = HF_CONFIG | {"text_config": text} | token_ids(vocab_size)
    return Qwen2_5_VLConfig(**settings)


def token_ids(vocab_size: int) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: vocab_size - len(names) + index for index, name in enumerate(names)}


def model_config(vocab_size: int, dtype: Any = jnp.float32) -> ModelConfig:
    """The config of the model: float32 for training, bfloat16 in the saved folder."""
    hf = hf_config(vocab_size)
    return registry.family(hf).config_from_hf(hf, dtype=dtype, max_model_len=None)


def build(config: ModelConfig) -> Any:
    """An abstract model."""
    return qwen2_5_vl(config)


def start(config: ModelConfig, seed: int) -> Params:
    """Normal weights by fan-in, norms of ones, biases of zeros."""
    rng, params = np.random.default_rng(seed), {}
    for path, variable in variables(build(config)).items():
        shape = variable.get_value().shape
        if len(shape) == 1:
            values = np.ones(shape) if "norm" in path or "ln_q" in path else np.zeros(shape)
        elif "embed_tokens" in path:
            values = rng.standard_normal(shape) * 0.02
        else:
            values = rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5
        params[path] = jnp.asarray(values, jnp.float32)
    return params


def logits(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """float32[S, V], at the selected positions only."""
    model = build(config)
    for path, variable in variables(model).items():
        variable.set_value(params[path])
    indices = encoder_indices(config)
    seen = jax.vmap(lambda patches: model.visual(patches=patches, **indices))(
        jnp.asarray(batch.patches)
    )
    tokens = jnp.asarray(batch.tokens)
    is_embed = tokens == token_ids(config.vocab_size)["image_token_id"]
    place = jnp.clip(jnp.cumsum(is_embed, axis=1) - 1, 0, NUM_TOKENS - 1)
    inputs = ForwardInput(
        token_ids=tokens,
        positions=jnp.asarray(batch.positions),
        attention=RowAttention(),
        embeds=jnp.take_along_axis(seen, place[..., None], axis=1),
        is_embed=is_embed,
    )
    hidden = model.hidden_states(inputs)
    return model.logits(hidden.reshape(tokens.size, -1)[batch.selected])


def loss(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """float32[]: mean cross-entropy of the targets."""
    found = logits(params, config, batch)
    each = optax.softmax_cross_entropy_with_integer_labels(found, batch.targets)
    return jnp.sum(each * batch.weights) / jnp.sum(batch.weights)


def encoder_indices(config: ModelConfig) -> dict[str, np.ndarray]:
    """The arguments of the tower except the patches: the same for all pictures, which have one size."""
    assert config.vision is not None
    nothing = np.zeros((NUM_PATCHES, config.vision.patch_values), np.float32)
    picture = Picture(patches=nothing, grid=GRID, num_tokens=NUM_TOKENS, content_hash=b"")
    inputs = config.vision.encoder_inputs(picture, NUM_PATCHES)
    return {name: array for name, array in inputs.items() if name != "patches"}
