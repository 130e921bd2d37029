"""The demo model as a pure function of its parameters: jaxpage's own Qwen2, and its loss.

Parameters are a dict by path, as `weights.spec.variables` names them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpage.demo.row_attention import RowAttention
from jaxpage.demo.tokens import Batch
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import family
from jaxpage.weights.spec import variables

Params = dict[str, jax.Array]

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    # So slow that half of a head's dimensions hardly rotate within 2048 tokens: they compare content.
    "rope_theta": 1e8,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def model_config(vocab_size: int, dtype: Any = jnp.float32) -> ModelConfig:
    """The config of the model: float32 for training, bfloat16 in the saved folder."""
    from transformers import Qwen2Config

    hf = Qwen2Config(**HF_CONFIG, vocab_size=vocab_size)
    return family(hf).config_from_hf(hf, dtype=dtype, max_model_len=None)


def logits(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """float32[S, V], at the selected positions only."""
    model = CausalLM(config)
    for path, variable in variables(model).items():
        variable.set_value(params[path])
    rows, length = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    inputs = ForwardInput(
        token_ids=jnp.asarray(batch.tokens), positions=positions, attention=RowAttention()
    )
    hidden = model.hidden_states(inputs)
    return model.logits(hidden.reshape(rows * length, -1)[batch.selected])


def loss(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """float32[]: mean cross-entropy of the targets."""
    found = logits(params, config, batch)
    each = optax.softmax_cross_entropy_with_integer_labels(found, batch.targets)
    return jnp.sum(each * batch.weights) / jnp.sum(batch.weights)
