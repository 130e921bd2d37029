"""Which kernel changes the recurrent states of rows with one token: chosen for an engine, from the shape of its states.

It takes these rows in decode steps and beside prompts. Rows of several tokens are computed by chunks, see
`packed_delta_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.device import Device
from jaxpage.ops.delta_rule import AnyTokens
from jaxpage.ops.implementations import (
    Choice,
    Implementation,
    first_supported,
    on_hopper,
    require,
)
from pallas_kernels.delta_rule.reference import Tokens
from pallas_kernels.tile_sizes import kernel_of


@dataclass(frozen=True, kw_only=True)
class _Need:
    operation: str  # "delta_rule" or "mamba2"
    states: jax.ShapeDtypeStruct  # of a device
    num_values: int  # value heads for each key head
    device: Device


def _accept_tpu(need: _Need) -> str:
    require(kernel_of(need.operation, "tpu").unsupported_reason(need.states))
    return "tpu"


def _accept_hopper(need: _Need) -> str:
    kernel = kernel_of(need.operation, "gpu")
    # A state of Mamba-2 has the columns of several heads.
    sizes = (need.num_values,) if need.operation == "mamba2" else ()
    require(kernel.unsupported_reason(need.states, *sizes))
    return "gpu"


IMPLEMENTATIONS: tuple[Implementation[_Need, str | None], ...] = (
    Implementation("tpu", "tpu", _accept_tpu),
    Implementation("hopper", "gpu", on_hopper(_accept_hopper)),
    Implementation("xla", None, lambda need: None),
)


def choose(
    state_shape: tuple[int, ...], num_values: int, device: Device, *, is_mamba: bool
) -> Choice[str | None]:
    """The platform whose kernel it is; None: XLA.

    state_shape: of one sequence in one layer, as far as a device has it, see `models.recurrent_config.RecurrentLayers`.
    num_values: value heads for each key head.
    """
    need = _Need(
        operation="mamba2" if is_mamba else "delta_rule",
        states=jax.ShapeDtypeStruct((1, *state_shape), jnp.float32),
        num_values=num_values,
        device=device,
    )
    return first_supported("recurrent states", IMPLEMENTATIONS, need, device.platform)


def one_token_of(tokens: AnyTokens, platform: str) -> Callable[..., Any]:
    """`one_token` of the chosen kernel for such tokens."""
    operation = "delta_rule" if isinstance(tokens, Tokens) else "mamba2"
    return kernel_of(operation, platform).one_token
