"""How a sampling parameter reaches the device: declared once, next to the function that uses it.

A `SlotField` is a value that the device keeps for each request slot. A `SamplerFeature` is a part of the sampler with
its fields; steps in which no row asks for it skip it. The request state, the upload at admission and the feature bits
(see `features`) are derived from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxpage.request import Request

# What the device keeps for each running sequence: arrays by name of the field, whose first axis is the request slot.
RequestState = dict[str, jax.Array]


def scalar(vocab_size: int) -> tuple[int, ...]:
    """The shape of a field with one number per slot."""
    return ()


def token_bits(vocab_size: int) -> tuple[int, ...]:
    """The shape of a field with one bit per token: bit `v % 32` of word `v // 32`."""
    return (-(-vocab_size // 32),)


@dataclass(frozen=True, kw_only=True)
class SlotField:
    """A value of each request slot, dtype[Q, *shape(vocab_size)] on the device; dtypes have 4 bytes."""

    name: str
    dtype: str = "int32"
    shape: Callable[[int], tuple[int, ...]] = scalar
    fill: int | float = 0  # the default, where `value` returns None
    # (request, vocab_size) -> a number or an array of the field's shape; None: `fill`
    value: Callable[[Request, int], Any]


# (logits float32[R, V], state, slots int32[R], positions int32[R] of the tokens to come) -> logits
Apply = Callable[[jax.Array, RequestState, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerFeature:
    """A part of the sampler: the fields it reads, which requests need it, and how it changes the logits of rows."""

    name: str
    fields: tuple[SlotField, ...] = field(default=(), repr=False)
    asked: Callable[[Request], bool] = field(repr=False)
    # None: the sampler implements the feature itself
    apply: Apply | None = field(default=None, repr=False)


# Parts of the sampler that only some engines have, such as those written by a user.
Processors = tuple[SamplerFeature, ...]
