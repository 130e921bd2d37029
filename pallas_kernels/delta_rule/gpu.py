"""The gated delta rule for rows of one token on Hopper GPUs, see `gpu_columns`.

XLA reads each state four times and writes it twice: it gathers for the value of the key, for the output and for the
new state, which it writes once to an array of its own and once to the slot.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule import gpu_columns
from pallas_kernels.delta_rule.gpu_columns import Heads, Token, in_rows
from pallas_kernels.delta_rule.reference import Rows


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel does not support states of this shape and dtype, in one line; None if it does."""
    return gpu_columns.unsupported_reason(states, states.shape[-1])


def one_token(
    states: Float[Array, "Q N J D F"],
    rows: Rows,
    number: Int[Array, ""],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "n N J F"]]:
    """`reference.one_token`. Raises NotImplementedError with the reason of `unsupported_reason`.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(states):
        raise NotImplementedError(reason)
    num_slots, num_keys, num_values, key_dim, value_dim = states.shape
    heads = Heads(num_keys * num_values, num_values, 1, value_dim)
    tokens, by_head = rows.tokens, (-1, heads.num)
    new_states, out = gpu_columns.one_token(
        states.reshape(num_slots, heads.num, key_dim, value_dim),
        rows,
        number,
        heads,
        name="delta_rule",
        gates=[x.reshape(by_head) for x in (jnp.exp(tokens.log_decay), tokens.beta)],
        next_tile=_next_tile,
        interpret=interpret,
    )
    return new_states.reshape(states.shape), out.reshape(tokens.v.shape)


def _next_tile(state: Any, token: Token) -> Any:
    decay, beta = token.gates
    state = state * decay
    correction = beta * (token.v - jnp.sum(state * token.k, axis=0))
    return state + token.k * in_rows(correction, state)
