"""Matrices of unsigned integers with scales and zeros, and how integers are packed into words.

W = (q - zero) * scale with q = 0 .. 2^bits - 1. Weights are rounded to the nearest within the range of their group,
which is all that a test of layouts needs; the tools choose more cleverly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.quantized_checkpoints.format import Array


@dataclass(frozen=True)
class Integers:
    """`q` int64[F, E], `zeros` int64[F, J], `scales` [F, J] as stored, `groups` int32[E] in 0 .. J - 1."""

    q: Array
    zeros: Array
    scales: Array
    groups: Array

    def dequantized(self) -> Array:
        """float32[F, E]; exact if scales have 16 bits."""
        steps = (self.q - self.zeros[:, self.groups]).astype(np.float32)
        return steps * self.scales.astype(np.float32)[:, self.groups]


def integers(
    weight: Array,
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool,
    scale_dtype: Any,
    order: Array | None = None,
) -> Integers:
    """Quantise float32[F, E]; groups are of `group_size` inputs (-1: all), taken in `order`, a permutation of them."""
    E = weight.shape[1]
    size = E if group_size == -1 else group_size
    assert E % size == 0
    groups = np.empty(E, np.int32)
    groups[np.arange(E) if order is None else order] = np.arange(E) // size
    members = [weight[:, groups == j] for j in range(E // size)]
    low = np.minimum(np.stack([m.min(1) for m in members], 1), 0)  # 0 is always within reach
    high = np.maximum(np.stack([m.max(1) for m in members], 1), 0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    largest = 2**bits - 1
    scales = ((high - low) / largest).clip(1e-5).astype(scale_dtype)
    widths = scales.astype(np.float32)
    zeros = np.full_like(low, 2 ** (bits - 1)) if symmetric else np.round(-low / widths)
    zeros = zeros.clip(0, largest).astype(np.int64)
    q = np.round(weight / widths[:, groups]) + zeros[:, groups]
    return Integers(q.clip(0, largest).astype(np.int64), zeros, scales, groups)


def pack(values: Array, bits: int) -> Array:
    """int32[..., ceil(N * bits / 32)] of int[..., N] in 0 .. 2^bits - 1: the first in the lowest bits of a word."""
    per_word = 32 // bits
    missing = -values.shape[-1] % per_word
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    words = padded.reshape(*values.shape[:-1], -1, per_word).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(words << shifts, axis=-1).view(np.int32)
