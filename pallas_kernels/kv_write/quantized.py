"""Keys and values in 8 or 4 bits: how they are quantized, packed, and dequantized.

int8 and int4 are asymmetric, with a scale and a zero for each token and KV head, separate for K and V, as LMDeploy's
`quant_policy` 8 and 4 (`quantize` has the formulas). The fp8 formats have no scale: they saturate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

LEVELS = {"int8": 255, "int4": 15}  # steps of the scale between minimum and maximum
FLOATS = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
FORMATS = (*LEVELS, *FLOATS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedPool:
    """One layer's pool, or blocks or tokens of it; replaces the array of an unquantized pool."""

    data: jax.Array  # uint8[N, S, 2*K, D], int4 uint8[N, S, 2*K, D / 2]; fp8 as its bits
    # [N, S, 2*K, 2]: scale and zero, in float32 or bfloat16 (its bits as uint16 on a CPU). None with fp8.
    scale_zero: jax.Array | None
    format: str = field(metadata={"static": True})  # one of FORMATS

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def quantize(
    kv: jax.Array, format: str, scale_zero_dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """uint8[..., D] (int4: [..., D / 2]) from kv [..., D], and scale and zero, [..., 2], or None.

    With n levels: scale = (max - min) / n, zero = -min / scale (not an integer), q = floor(x / scale + zero + 1/2) in
    0..n, in float32, with scale and zero as stored. So the error is at most scale / 2; at the ends of the range, which
    rounding of scale and zero to bfloat16 may cut off, 2^-8 (|min| + max - min) more. int4 packs
    byte d = q[d] + 16 * q[d + D / 2].
    """
    x = kv.astype(jnp.float32)
    if format in FLOATS:
        limit = float(jnp.finfo(FLOATS[format]).max)  # beyond it are NaN (e4m3) and inf (e5m2)
        return lax.bitcast_convert_type(
            jnp.clip(x, -limit, limit).astype(FLOATS[format]), jnp.uint8
        ), None
    assert scale_zero_dtype is not None
    levels, low, high = LEVELS[format], x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    # If all values are equal (padding, zeros) the scale would be 0 and the zero NaN. The resolution of float32 at the
    # largest value is a sufficient scale; if that is 0, the smallest normal number.
    info, stored = jnp.finfo(jnp.float32), jnp.finfo(scale_zero_dtype)
    finest = jnp.maximum(jnp.maximum(high, -low) * float(info.eps), float(info.tiny))
    # Not a round trip of conversions, which XLA may remove.
    scale = lax.reduce_precision(
        jnp.maximum((high - low) / levels, finest), stored.nexp, stored.nmant
    )
    zero = lax.reduce_precision(-low / scale, stored.nexp, stored.nmant)
    steps = x / scale + zero
    q = jnp.clip(jnp.floor(steps + 0.5), 0, levels).astype(jnp.uint8)
    if format == "int4":
        first, second = jnp.split(q, 2, axis=-1)
        q = first + (second << 4)
    return q, jnp.concatenate([scale, zero], axis=-1).astype(scale_zero_dtype)


def dequantize(data: jax.Array, scale_zero: jax.Array | None, format: str) -> jax.Array:
    """float32[..., D] from the results of `quantize`: (q - zero) * scale."""
    if format in FLOATS:
        return _read_fp8(data, format)
    assert scale_zero is not None
    if format == "int4":
        data = _unpack(data)
    scale, zero = jnp.split(scale_zero.astype(jnp.float32), 2, axis=-1)
    return (data.astype(jnp.float32) - zero) * scale


def _read_fp8(bits: jax.Array, format: str) -> jax.Array:
    """Through float16, which takes one instruction: XLA:CPU's own conversions take 2 and 3.5 times as long."""
    wide = bits.astype(jnp.uint16)
    if format == "fp8_e5m2":
        return lax.bitcast_convert_type(wide << 8, jnp.float16).astype(jnp.float32)
    # 4 bits of exponent, 3 of mantissa; float16 has 5 and 10, and a bias larger by 8.
    magnitude = wide & 0x7F
    half = ((wide & 0x80) << 8) | (magnitude << 7)
    half = jnp.where(magnitude == 0x7F, 0x7E00, half)  # NaN
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 2.0**8


def _unpack(data: jax.Array) -> jax.Array:
    """uint8[..., D / 2] with two values per byte → uint8[..., D]."""
    *shape, width = data.shape
    if width % 4:
        return jnp.concatenate([data & 15, data >> 4], axis=-1)
    # Four bytes at a time, with a shift for each half instead of a concatenation, and materialized before others use
    # them: otherwise attention on XLA:CPU takes 1.4 times as long.
    words = lax.bitcast_convert_type(data.reshape(*shape, 1, width // 4, 4), jnp.uint32)
    shifts = 4 * lax.broadcasted_iota(jnp.uint32, (*shape, 2, width // 4), len(shape))
    words = lax.optimization_barrier((words >> shifts) & 0x0F0F0F0F)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*shape, 2 * width)
