"""The MTP layer of Qwen3-Next and Qwen3.5: gated attention, and an MLP or experts, as the first layer of the model has
(vLLM's `Qwen3NextMTP` and `Qwen3_5MTP`, SGLang's `Qwen3NextForCausalLMMTP`).

Pairs of an embedding and a hidden state are as in `models.mtp`, but that the first pair of a sequence has an embedding
like all others. The layer's own hidden states are taken after its last norm. It has no recurrent state, whatever the
model has. Embedding and LM head are the model's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import EagleOptions, ModelConfig
from jaxpage.models.decoder import DecoderLayer, hidden_norm
from jaxpage.models.eagle import pair_projection
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import OffsetRMSNorm
from jaxpage.models.mtp import check_layer, check_same_model, mtp_head
from jaxpage.models.qwen3_5 import GatedAttention
from jaxpage.models.sources import Place, Source, Stacked, renamed, separate_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# In checkpoints these are beside the layers, of which the first is used; here they are in it.
_BESIDE = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_OURS, _THEIRS = "model.layers.0.", "mtp.layers.0."


class QwenMTPLayer(DecoderLayer):
    """A layer with gated attention, between a map of pairs to its inputs and a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, 0, norm=OffsetRMSNorm)
        self.self_attn = GatedAttention(config, 0)
        self.rope = config.ropes[0]
        self.pre_fc_norm_embedding = hidden_norm(OffsetRMSNorm, config)
        self.pre_fc_norm_hidden = hidden_norm(OffsetRMSNorm, config)
        self.fc = pair_projection(config)
        self.norm = hidden_norm(OffsetRMSNorm, config)

    def guess(self, inputs: ForwardInput, hidden: jax.Array, embeds: jax.Array) -> jax.Array:
        """As `mtp.MTPLayer.guess`, but all pairs have an embedding."""
        rotation = inputs.rotation(self.rope, hidden.dtype)
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(jnp.concatenate(both, axis=-1))
        return self.norm(self(x, rotation, inputs.attention, inputs.is_token))


qwen_mtp_head = partial(mtp_head, layer=QwenMTPLayer)


def qwen_mtp_config(
    hf: PretrainedConfig, target: ModelConfig, *, tensors: Collection[str] | None
) -> ModelConfig:
    """The description of the MTP layer of a checkpoint, as `mtp.mtp_config`.

    Where config.json does not say how many such layers there are, as that of Qwen3-Next, there is one if its tensors
    are there. Of several it is the first, as in vLLM.
    """
    text = hf.get_text_config()
    check_same_model(hf, text, target)
    options = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    given = next(((each, getattr(text, each)) for each in options if hasattr(text, each)), None)
    # Of a norm, which no format of quantised weights renames.
    check_layer(target, given, "mtp.pre_fc_norm_hidden.weight", tensors)
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            f"{target.architecture}: mtp_use_dedicated_embeddings is set in config.json, and MTP layers with an "
            "embedding of their own are not supported; leave speculative_config out"
        )
    experts = target.experts
    if experts is not None:
        experts = replace(experts, layers=(0,)) if 0 in experts.layers else None
    return replace(
        target,
        num_layers=1,
        windows=target.windows[-1:],
        ropes=target.ropes[-1:],
        experts=experts,
        recurrent=None,
        vision=None,
        eagle=EagleOptions(
            layers=(), target_hidden_size=target.hidden_size, has_head=False, mtp_layer=0
        ),
    )


def qwen_mtp_name(config: ModelConfig, name: str) -> str | None:
    """The name of a tensor, unchanged, if it is not of the model or of a further such layer; else None."""
    del config
    is_further = name.startswith("mtp.layers.") and not name.startswith(_THEIRS)
    return name if name.startswith("mtp.") and not is_further else None


def qwen_mtp_places(config: ModelConfig) -> dict[str, Place]:
    """Where the checkpoint has the parameters, under names that its quantization_config knows."""
    places: dict[str, Place] = {}
    for path, _ in nnx.to_flat_state(nnx.state(qwen_mtp_head(config), nnx.Param)):
        ours = ".".join(map(str, path))
        places[ours] = Source(_theirs(ours))
    for ours, place in separate_experts(config).items():
        assert isinstance(place, Stacked)
        places[ours] = renamed(replace(place, whole=ours), _theirs)
    return places


def _theirs(ours: str) -> str:
    """The name in checkpoints of what we call so."""
    inner = ours.removeprefix(_OURS)
    return f"mtp.{inner}" if inner.partition(".")[0] in _BESIDE else f"{_THEIRS}{inner}"
