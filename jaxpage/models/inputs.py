"""The inputs of a model: tokens or embeddings, their positions, and the attention between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpage.models.attention import Attention
from jaxpage.models.recurrence import Recurrence, WholeSequences
from jaxpage.models.rope import Rope, Rotation
from jaxpage.ops.rope import Rotate


@dataclass(frozen=True, kw_only=True)
class ForwardInput:
    """The tokens of one call, the same for the paged step and the dense, differentiable call.

    Lives only while the call is traced: `attention` may hold the KV pool.
    """

    token_ids: jax.Array  # int32[..., T]
    # int32[..., T], or int32[3, ..., T] for models whose RoPE has sections (time, height, width)
    positions: jax.Array
    attention: Attention
    # [..., T, E] in the model's dtype, used where `is_embed`, bool[..., T], is set. They are the inputs of the first
    # layer, so they are not scaled like token embeddings in some families (Hugging Face's `inputs_embeds`).
    # [..., T, n * E]: the first E values are used so; the others are added to what layers 0, 1, ... return (Qwen3-VL).
    embeds: jax.Array | None = None
    is_embed: jax.Array | None = None
    # bool[..., T]: the others are padding, whose results are not used. None: no padding.
    is_token: jax.Array | None = None
    # Each mixture of experts appends int32[X]: the number of tokens of each expert. None: they are not counted.
    expert_load: list[jax.Array] | None = None
    # int32[..., T]: the slot of each token's adapter, 0 for none; for models with adapters, see `models.lora`.
    adapter_slots: jax.Array | None = None
    rotate: Rotate = Rotate()  # the heads of each layer, by their positions
    # Of layers with a recurrent state; by default tokens are whole sequences without padding.
    recurrence: Recurrence = field(default_factory=WholeSequences)
    # By the number of a layer: the call sets [..., T, E], its input, for those that are keys; behind the last layer,
    # its output.
    kept: dict[int, jax.Array | None] = field(default_factory=dict)

    def rotation(self, rope: Rope, dtype: jnp.dtype) -> Rotation:
        """What turns the heads of layers with this RoPE: cos and sin in `dtype`, of each token's position or three."""
        three = self.positions.ndim > self.token_ids.ndim
        return Rotation(*rope.arrays(self.positions, dtype, three=three), rotate=self.rotate)

    def keep(self, layer: int, x: jax.Array) -> None:
        """Called by the model with the input of each layer."""
        if layer in self.kept:
            self.kept[layer] = x
