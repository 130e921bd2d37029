"""Mamba-2 for rows of one token on Hopper GPUs, see `delta_rule/gpu_columns.py`.

XLA reads each state three times and writes it twice: it gathers for the output and for the new state, which it writes
once to an array of its own and once to the slot.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule import gpu_columns
from pallas_kernels.delta_rule.gpu_columns import Heads, Token, in_rows
from pallas_kernels.delta_rule.reference import Rows


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array, num_values: int) -> str | None:
    """Why the kernel does not support such states, of so many heads for each key, in one line; None if it does."""
    return gpu_columns.unsupported_reason(states, states.shape[-1] // num_values)


def one_token(
    states: Float[Array, "Q N D V"],
    rows: Rows,
    number: Int[Array, ""],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "Q N D V"], Float[Array, "n N V"]]:
    """`reference.one_token`. Raises NotImplementedError with the reason of `unsupported_reason`.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    tokens = rows.tokens
    num_rows, num_keys, num_values = tokens.log_decay.shape
    if reason := unsupported_reason(states, num_values):
        raise NotImplementedError(reason)
    num_heads = num_keys * num_values
    new_states, out = gpu_columns.one_token(
        states,
        rows,
        number,
        Heads(num_heads, num_values, num_values, states.shape[-1] // num_values),
        name="mamba2",
        gates=[jnp.exp(tokens.log_decay).reshape(num_rows, num_heads)],
        next_tile=_next_tile,
        interpret=interpret,
    )
    return new_states, out.reshape(tokens.v.shape)


def _next_tile(state: Any, token: Token) -> Any:
    (decay,) = token.gates
    return state * decay + token.k * in_rows(token.v, state)
