"""8-bit and 4-bit weights of linear layers: how they are quantized, packed, and unpacked. Knows no kernel and no model.

Letters: E inputs, F outputs, J groups of E / J adjacent inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

FORMATS = ("int8", "int4", "fp8_e4m3")
FP8 = jnp.float8_e4m3fn
MIDDLE = 8  # the zero of int4 weights without zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight [F, E] as checkpoints store linear layers, or the weights [X, F, E] of X experts: then each array has an
    axis of experts before those given here. The dtype of `data` is its format.

    - int8: int8[F, E]; the weight is data * scale, with a scale per output, or per output and group: group j has inputs
      [j g, (j + 1) g), g = E / J. A checkpoint's scale for a block of several outputs is repeated for each of them.
    - fp8_e4m3: float8_e4m3fn[F, E]; likewise.
    - int4: uint8[F, E / 2], always with groups. The weight is (q - zero[j]) * scale[j] with q in 0..15. Of each pair of
      groups the first has the low halves of bytes, the second the high ones: byte p g + i holds
      q[2 p g + i] + 16 q[(2 p + 1) g + i]. So a kernel unpacks whole groups without moving data. J is even; an odd
      number is padded by a group with scale 0, and then E here is larger than that of x.
    """

    data: jax.Array
    scale: jax.Array  # float32[F], or of groups float32[J, F]
    zero: jax.Array | None = None  # int4 only: uint8[J, F]; None: 8 everywhere

    @property
    def format(self) -> str:
        return {"int8": "int8", "uint8": "int4"}.get(self.data.dtype.name, "fp8_e4m3")

    @property
    def shape(self) -> tuple[int, ...]:
        """(F, E), of experts (X, F, E), where E includes int4's padding."""
        *rest, width = self.data.shape
        return (*rest, width * (2 if self.format == "int4" else 1))

    @property
    def has_groups(self) -> bool:
        return self.scale.ndim == self.data.ndim

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale."""
        return self.shape[-1] // (self.scale.shape[-2] if self.has_groups else 1)

    @property
    def rounds_x(self) -> bool:
        """Whether x is meant to be rounded to int8 too. Groups of int8 weights are for x that is not rounded."""
        return self.format == "int8" and not self.has_groups

    def __getitem__(self, expert: Any) -> QuantizedWeight:
        """The weight of an expert, or the weights of a slice of them."""
        return jax.tree.map(lambda array: array[expert], self)


def quantize(weight: jax.Array, format: str, group_size: int | None = None) -> QuantizedWeight:
    """Quantize `weight` [F, E] by its extreme values, with rounding to nearest: in float32, for checkpoints that are
    not quantized, and tests.

    int8 and fp8 are symmetric: scale = max |w| / 127 or 448, per output, or with `group_size` per output and group.
    int4 is asymmetric, per output and group, as AWQ (arXiv:2306.00978): scale = (max(w, 0) - min(w, 0)) / 15, zero =
    round(-min(w, 0) / scale). Raises ValueError if E is not a multiple of `group_size`.
    """
    w = weight.astype(jnp.float32)
    if format != "int4" and group_size is None:
        data, scale = _symmetric(w, format)
        return QuantizedWeight(data=data, scale=scale)
    if group_size is None or w.shape[1] % group_size:
        raise ValueError(f"{w.shape[1]} inputs are not divided into groups of {group_size}")
    groups = w.reshape(w.shape[0], -1, group_size)
    if format != "int4":
        data, scale = _symmetric(groups, format)
        return QuantizedWeight(data=data.reshape(w.shape), scale=scale.T)
    low = jnp.minimum(groups.min(axis=2), 0.0)
    scale = (jnp.maximum(groups.max(axis=2), 0.0) - low) / 15.0
    scale = jnp.where(scale == 0.0, 1.0, scale)
    zero = jnp.round(-low / scale)
    q = jnp.clip(jnp.round(groups / scale[:, :, None]) + zero[:, :, None], 0.0, 15.0)
    q = q.astype(jnp.uint8).reshape(w.shape)
    return pack(q, scale.T, zero.T.astype(jnp.uint8))


def _symmetric(w: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """int8 or fp8 of float32[..., E], and their scale float32[...]."""
    most = 127.0 if format == "int8" else float(jnp.finfo(FP8).max)
    scale = jnp.abs(w).max(axis=-1) / most
    # Also of numbers so small that their scale would be 0, which fp8 would make NaN.
    scale = jnp.where(scale == 0.0, 1.0, scale)
    w = w / scale[..., None]
    return jnp.round(w).astype(jnp.int8) if format == "int8" else w.astype(FP8), scale


def pack(q: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> QuantizedWeight:
    """A QuantizedWeight from uint8[F, E] in 0..15, float32[J, F] and uint8[J, F] (None: 8)."""
    (num_out, _), num_groups = q.shape, scale.shape[0]
    groups = q.reshape(num_out, num_groups, -1)
    if num_groups % 2:
        groups = jnp.pad(groups, ((0, 0), (0, 1), (0, 0)))
        scale = jnp.pad(scale, ((0, 1), (0, 0)))
        zero = None if zero is None else jnp.pad(zero, ((0, 1), (0, 0)))
    data = groups[:, 0::2] | (groups[:, 1::2] << 4)
    return QuantizedWeight(data=data.reshape(num_out, -1), scale=scale, zero=zero)


def unpack(weight: QuantizedWeight) -> jax.Array:
    """q - zero of an int4 weight, int8[F, J, E / J]; the inverse of `pack` except for padding and zeros."""
    pairs = weight.data.reshape(weight.shape[0], -1, 1, weight.group_size)
    q = jnp.concatenate([pairs & 15, pairs >> 4], axis=2)
    q = q.reshape(weight.shape[0], -1, weight.group_size).astype(jnp.int8)
    if weight.zero is None:
        return q - jnp.int8(MIDDLE)
    return q - weight.zero.T[:, :, None].astype(jnp.int8)


def round_rows(x: jax.Array, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """x [T, E] -> int8[T, E] and float32[T, 1]; their product is x with an error of at most half a scale.

    In float32: scale = max |x| * (1 / 127), or 1 for zeros, and integers = round(x * (1 / scale)), ties to even, at
    most 127 in magnitude. `axis_name`: the mesh axis whose devices have parts of the same rows.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis=1, keepdims=True)
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    # No division by rows: XLA multiplies by the reciprocal in some programs and divides in others, and a value halfway
    # between two integers would be rounded differently.
    scale = jnp.where(largest == 0.0, 1.0, largest * (1.0 / 127.0))
    return jnp.round(x * (1.0 / scale)).astype(jnp.int8), scale


def not_for_rounded_rows(weight: QuantizedWeight) -> str | None:
    """Why rounded rows of x are not multiplied with this weight, in one line; None if they are."""
    if weight.format != "int8":
        return f"x is rounded for int8 weights, and this one is {weight.format}"
    if weight.has_groups:
        return f"x is rounded for a scale per output, and this weight has groups of {weight.group_size} inputs"
    return None


def padded(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x with zeros for the padding of an int4 weight. Raises ValueError if it does not fit the weight."""
    missing = weight.shape[-1] - x.shape[1]
    if missing == 0:
        return x
    if weight.format != "int4" or missing != weight.group_size:
        raise ValueError(
            f"x has {x.shape[1]} inputs and the {weight.format} weight {weight.shape[-1]}"
        )
    return jnp.pad(x, ((0, 0), (0, missing)))
