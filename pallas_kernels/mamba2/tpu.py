"""Mamba-2 for rows of one token on a TPU: each state is read and written once, in place.

A step of the grid has some columns of a row's state [D, V]. Tokens come as XLA lays them out, those of eight rows at a
time; keys and queries are turned into columns of D numbers, which are broadcast along the lanes.
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
from pallas_kernels.delta_rule.tpu import MOST_BYTES
from pallas_kernels.mamba2.reference import of_columns
from pallas_kernels.mosaic_tpu import LANES

_SUBLANES = 8
_TURN = 4  # registers of lanes that are computed at a time, of all sublanes


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot serve states of this shape; None if it can."""
    *_, key_dim, num_columns = states.shape
    if num_columns % LANES or key_dim % _SUBLANES:
        return (
            f"states of {key_dim} x {num_columns} are not whole registers of {_SUBLANES} x {LANES}"
        )
    if 4 * key_dim * LANES > MOST_BYTES:
        return f"{LANES} columns of {key_dim} numbers exceed {MOST_BYTES >> 20} MB"
    return None


def one_token(
    states: Float[Array, "Q N D V"],
    rows: Rows,
    number: Int[Array, ""],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "Q N D V"], Float[Array, "n N V"]]:
    """`reference.one_token`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    if reason := unsupported_reason(states):
        raise NotImplementedError(reason)
    _, num_keys, key_dim, num_columns = states.shape
    parts = 1
    while num_columns % (parts * LANES) or 4 * key_dim * num_columns > parts * MOST_BYTES:
        parts += 1
    width = num_columns // parts

    num_rows = rows.slots.size
    at_once = min(_SUBLANES, num_rows)
    of_keys = pl.BlockSpec(
        (None, at_once, key_dim), lambda key, part, i, *_: (key, i // at_once, 0)
    )
    of_values = pl.BlockSpec(
        (at_once, width), lambda key, part, i, *_: (i // at_once, key * parts + part)
    )
    of_states = pl.BlockSpec(
        (None, None, key_dim, width), lambda key, part, i, slots, *_: (slots[i], key, 0, part)
    )

    def kernel(_slots, begins, number, states, q, k, v, decay, new_states, out):
        index = pl.program_id(2)
        is_own = _is_row(index % at_once, at_once)

        @pl.when(index < number[0])
        def _():
            is_new = begins[index] > 0
            key, query = (_column(_row_of(x[...], is_own)) for x in (k, q))
            for start in range(0, width, _TURN * LANES):
                some = pl.ds(start, min(_TURN * LANES, width - start))
                state = jnp.where(is_new, 0.0, states[:, some])
                state = state * _row_of(decay[:, some], is_own) + key * _row_of(v[:, some], is_own)
                new_states[:, some] = state
                new = jnp.sum(state * query, axis=0, keepdims=True)
                out[:, some] = jnp.where(is_own, new, out[:, some])

    shape = (num_rows, num_keys * num_columns)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_keys, parts, jnp.maximum(number, 1)),
            in_specs=[of_states, of_keys, of_keys, of_values, of_values],
            out_specs=[of_states, of_values],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        input_output_aliases={3: 0},
        interpret=interpret,
        name="mamba2",
    )
    scalars: tuple[Any, ...] = (rows.slots, rows.begins.astype(jnp.int32), number[None])
    q, k, v, log_decay = rows.tokens
    decay = of_columns(jnp.exp(log_decay), num_columns)
    by_key = (x.swapaxes(0, 1) for x in (q, k))
    new_states, out = call(*scalars, states, *by_key, v.reshape(shape), decay.reshape(shape))
    return new_states, out.reshape(v.shape)


def _is_row(number: jax.Array, size: int) -> jax.Array:
    """bool[size, 1], which chooses a row of as many. Mosaic loads and stores no row by its number where there are
    several registers side by side.
    """
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0) == number


def _row_of(x: jax.Array, is_own: jax.Array) -> jax.Array:
    """The row [1, lanes] of x [size, lanes] that `_is_row`."""
    return jnp.sum(jnp.where(is_own, x, 0.0), axis=0, keepdims=True)


def _column(row: jax.Array) -> jax.Array:
    """[D, 1] of [1, D]"""
    shape = (row.shape[1], row.shape[1])
    is_own = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(is_own, row, 0.0), axis=1, keepdims=True)
