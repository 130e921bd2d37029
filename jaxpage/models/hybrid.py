"""The layer of families that have a recurrent state in most layers and attention in the others.

Must not know which families these are, nor what keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import DecoderLayer
from jaxpage.models.layers import Norm, RMSNorm
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.rope import Rotation


class HybridLayer(DecoderLayer):
    """A recurrent part, or attention in the layers without a recurrent state; then an MLP or experts."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        name: str,
        part: Callable[[ModelConfig, int], nnx.Module],
        norm: Norm = RMSNorm,
    ):
        """name: of the recurrent part, as an attribute; part: makes it."""
        super().__init__(config, index, norm=norm)
        sizes = config.recurrent
        self._recurrent_part = name if sizes is not None and index in sizes.layers else None
        if self._recurrent_part is not None:
            del self.self_attn
            setattr(self, name, part(config, index))

    def first_half(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        recurrence: Recurrence | None,
    ) -> jax.Array:
        if self._recurrent_part is None:
            return super().first_half(x, rotation, attention, recurrence)
        return getattr(self, self._recurrent_part)(self.input_layernorm(x), recurrence)
