"""The gated delta rule for rows of one token on a TPU: each state is read and written once, in place.

A step of the grid has some heads of a row. A head's state is 16 registers of D x F; keys and queries are columns, which
are broadcast along the lanes. XLA would gather the states of all rows, and read and write them three times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Rows
from pallas_kernels.mosaic_tpu import LANES

MOST_BYTES = 1 << 20  # of the states of a step, of which four are in VMEM
_SUBLANES = 8


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot serve states of this shape; None if it can."""
    *_, key_dim, value_dim = states.shape
    if value_dim % LANES or key_dim % _SUBLANES:
        return f"states of {key_dim} x {value_dim} are not whole registers of {_SUBLANES} x {LANES}"
    if 4 * states.shape[2] * key_dim * value_dim > MOST_BYTES:
        return f"the states of {states.shape[2]} heads with one key exceed {MOST_BYTES >> 20} MB"
    return None


def one_token(
    states: Float[Array, "Q N J D F"],
    rows: Rows,
    number: Int[Array, ""],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "n N J F"]]:
    """`reference.one_token`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    if reason := unsupported_reason(states):
        raise NotImplementedError(reason)
    _, num_keys, num_values, key_dim, value_dim = states.shape
    heads = num_keys
    while heads * num_values * key_dim * value_dim * 4 > MOST_BYTES or num_keys % heads:
        heads -= 1
    parts, values = num_keys // heads, heads * num_values

    def columns(x: jax.Array) -> jax.Array:
        """[n, parts, D, heads]"""
        return x.reshape(-1, parts, heads, key_dim).swapaxes(2, 3)

    def lanes(x: jax.Array) -> jax.Array:
        """[n, N J, F]"""
        wide = jnp.broadcast_to(x[..., None], (*x.shape, value_dim))
        return wide.reshape(-1, num_keys * num_values, value_dim)

    of_heads = pl.BlockSpec((None, None, key_dim, heads), lambda i, part, *_: (i, part, 0, 0))
    of_values = pl.BlockSpec((None, values, value_dim), lambda i, part, *_: (i, part, 0))
    of_states = pl.BlockSpec(
        (None, heads, num_values, key_dim, value_dim),
        lambda i, part, slots, *_: (slots[i], part, 0, 0, 0),
    )

    def kernel(_slots, begins, number, states, q, k, v, decay, beta, new_states, out):
        index = pl.program_id(0)

        @pl.when(index < number[0])
        def _():
            is_new = begins[index] > 0
            for head in range(heads):
                key, query = k[:, pl.ds(head, 1)], q[:, pl.ds(head, 1)]
                for value in range(num_values):
                    row = pl.ds(head * num_values + value, 1)
                    state = jnp.where(is_new, 0.0, states[head, value]) * decay[row]
                    known = jnp.sum(state * key, axis=0, keepdims=True)
                    state += key * (beta[row] * (v[row] - known))
                    new_states[head, value] = state
                    out[row] = jnp.sum(state * query, axis=0, keepdims=True)

    shape = (rows.slots.size, num_keys * num_values, value_dim)
    out_shape = [
        jax.ShapeDtypeStruct(states.shape, states.dtype),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(jnp.maximum(number, 1), parts),
            in_specs=[of_states, of_heads, of_heads, of_values, of_values, of_values],
            out_specs=[of_states, of_values],
        ),
        out_shape=out_shape,
        input_output_aliases={3: 0},
        interpret=interpret,
        name="delta_rule",
    )
    scalars: tuple[Any, ...] = (rows.slots, rows.begins.astype(jnp.int32), number[None])
    q, k, v, log_decay, beta = rows.tokens
    gates = lanes(jnp.exp(log_decay)), lanes(beta)
    new_states, out = call(*scalars, states, columns(q), columns(k), v.reshape(shape), *gates)
    return new_states, out.reshape(v.shape)
