"""The gated delta rule for rows of one token on a TPU: each state is read and written once, in place.

A step of the grid has some heads of a row. A head's state is 16 registers of D x F. Tokens come as XLA lays them out,
those of eight rows at a time; keys and queries are turned into columns, which are broadcast along the lanes. XLA would
gather the states of all rows, and read and write them three times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    parts, values, num_rows = num_keys // heads, heads * num_values, rows.slots.size
    at_once = min(_SUBLANES, num_rows)

    def by_part(x: jax.Array) -> jax.Array:
        """[parts, n, heads J] of [n, N, J]"""
        return x.reshape(num_rows, parts, values).swapaxes(0, 1)

    of_keys = pl.BlockSpec((heads, at_once, key_dim), lambda part, i, *_: (part, i // at_once, 0))
    of_gates = pl.BlockSpec((None, at_once, values), lambda part, i, *_: (part, i // at_once, 0))
    of_values = pl.BlockSpec(
        (at_once, values * value_dim), lambda part, i, *_: (i // at_once, part)
    )
    of_states = pl.BlockSpec(
        (None, heads, num_values, key_dim, value_dim),
        lambda part, i, slots, *_: (slots[i], part, 0, 0, 0),
    )

    def kernel(_slots, begins, number, states, q, k, v, decay, beta, new_states, out):
        index = pl.program_id(1)
        is_own = is_row(index % at_once, at_once)

        @pl.when(index < number[0])
        def _():
            is_new = begins[index] > 0
            decays, betas = row_of(decay[...], is_own), row_of(beta[...], is_own)
            for head in range(heads):
                key, query = (column(row_of(x[head], is_own)) for x in (k, q))
                for value in range(num_values):
                    place = head * num_values + value
                    gate, lanes = slice(place, place + 1), pl.ds(place * value_dim, value_dim)
                    state = jnp.where(is_new, 0.0, states[head, value]) * decays[:, gate]
                    known = jnp.sum(state * key, axis=0, keepdims=True)
                    state += key * (betas[:, gate] * (row_of(v[:, lanes], is_own) - known))
                    new_states[head, value] = state
                    new = jnp.sum(state * query, axis=0, keepdims=True)
                    out[:, lanes] = jnp.where(is_own, new, out[:, lanes])

    shape = (num_rows, num_keys * num_values * value_dim)
    out_shape = [
        jax.ShapeDtypeStruct(states.shape, states.dtype),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, jnp.maximum(number, 1)),
            in_specs=[of_states, of_keys, of_keys, of_values, of_gates, of_gates],
            out_specs=[of_states, of_values],
        ),
        out_shape=out_shape,
        input_output_aliases={3: 0},
        interpret=interpret,
        name="delta_rule",
    )
    scalars: tuple[Any, ...] = (rows.slots, rows.begins.astype(jnp.int32), number[None])
    q, k, v, log_decay, beta = rows.tokens
    by_key = (x.swapaxes(0, 1) for x in (q, k))
    gates = by_part(jnp.exp(log_decay)), by_part(beta)
    new_states, out = call(*scalars, states, *by_key, v.reshape(shape), *gates)
    return new_states, out.reshape(v.shape)


def is_row(number: jax.Array, size: int) -> jax.Array:
    """bool[size, 1], which chooses a row of as many. Mosaic loads and stores no row by its number where there are
    several registers side by side.
    """
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0) == number


def row_of(x: jax.Array, is_own: jax.Array) -> jax.Array:
    """The row [1, lanes] of x [size, lanes] that `is_row`."""
    return jnp.sum(jnp.where(is_own, x, 0.0), axis=0, keepdims=True)


def column(row: jax.Array) -> jax.Array:
    """[D, 1] of [1, D]"""
    shape = (row.shape[1], row.shape[1])
    is_own = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(is_own, row, 0.0), axis=1, keepdims=True)
