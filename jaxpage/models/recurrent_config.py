"""The description of layers with a recurrent state: the part of `config.ModelConfig` that says their sizes.

Knows no names of transformers. Must not know parameters or checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MambaOptions:
    """What only Mamba-2 has, see `mamba2`."""

    projection_bias: bool
    convolution_bias: bool
    time_steps: tuple[float, float]  # the least and the most
    output_bias: bool | None = None  # None: as `projection_bias`
    # What is normalised: what the gate has multiplied, what it multiplies then, or nothing.
    norm: Literal["gated", "before the gate"] | None = "gated"
    factors: tuple[float, ...] | None = None  # of the projection's parts, `mamba2.part_sizes`


@dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
    """Layers with a recurrent state in place of keys and values or beside them, see `gated_delta_net`, `mamba2` and
    `lfm2`. It is the last W - 1 inputs of a convolution, and float32 of `state_shape`. Of LFM2 there is only the
    former: the key dim is 0, and each of N heads has a channel.
    """

    layers: tuple[int, ...]
    num_key_heads: int  # N
    values_per_key: int  # J: value heads for each key head
    key_dim: int  # D
    value_dim: int  # F
    num_taps: int  # W, of the convolution
    mamba: MambaOptions | None = None  # if they are Mamba-2
    convolution_bias: bool = False  # of LFM2, also of its projections
    beside_attention: bool = False  # the layers have both (Falcon-H1)

    @property
    def has_matrix(self) -> bool:
        """Whether the state is more than inputs of the convolution."""
        return self.key_dim > 0

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[N, J, D, F]; of Mamba-2, where heads with the same keys have one, [N, D, J F]. Only if `has_matrix`."""
        if self.mamba is not None:
            return (self.num_key_heads, self.key_dim, self.values_per_key * self.value_dim)
        return (self.num_key_heads, self.values_per_key, self.key_dim, self.value_dim)

    @property
    def num_value_heads(self) -> int:
        return self.num_key_heads * self.values_per_key

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_changes(self) -> int:
        """How many numbers of a token change the matrices: its keys, values and gates, see `ops.delta_rule`."""
        if not self.has_matrix:
            return 0
        gates = 2 if self.mamba is None else 1
        return self.num_key_heads * self.key_dim + self.num_value_heads * (self.value_dim + gates)
