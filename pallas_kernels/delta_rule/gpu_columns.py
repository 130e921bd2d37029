"""A token of each row on Hopper GPUs (sm_90a) in Mosaic GPU: each state is read and written once, in place.

Shared by the gated delta rule and Mamba-2, whose columns do not depend on each other. A program has WIDTH columns of a
head of a row, all D rows of them, in registers: a thread has four columns of every eighth row. All loads of a program
are under way before it computes. At D = 128 these are 32 KB, and an SM has three programs, whose loads, sums and stores
overlap. So states need neither shared memory nor TMA. Sums over D go through registers, a shuffle and 2 KB of shared
memory, in an order that depends on D alone.

Letters: Q slots, n rows, G states of a slot, D rows and W columns of each, N key heads, H value heads, F value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Rows
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.wgmma import load, piece, store

WIDTH = 64  # columns of a program
LINES = 8  # rows of a state that the threads load at once
MOST_ROWS = 256  # of a state, which take half of a thread's registers


class Heads(NamedTuple):
    """H value heads of F columns. A state has those of `in_state` heads, one beside the other."""

    num: int
    of_key: int  # value heads for each key head
    in_state: int
    value_dim: int


class Token(NamedTuple):
    """What a token does to the columns of a program, in float32."""

    k: Any  # [D, WIDTH]: its key, in each column
    v: Any  # [WIDTH]: a value for each column
    gates: tuple[Any, ...]  # numbers, such as the head's decay


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array, value_dim: int) -> str | None:
    """Why the kernel does not support such states, [Q, ..., D, W], in one line; None if it does."""
    if reason := unsupported_jax():
        return reason
    key_dim = states.shape[-2]
    if states.dtype != jnp.float32:
        return f"states are {states.dtype}; the kernel reads float32"
    if key_dim % LINES or key_dim > MOST_ROWS:
        return f"key dim {key_dim} is no multiple of {LINES} up to {MOST_ROWS}"
    if value_dim % WIDTH:
        return f"value dim {value_dim} is no multiple of {WIDTH}"
    return None


def one_token(
    states: Float[Array, "Q G D W"],
    rows: Rows,
    number: Int[Array, ""],
    heads: Heads,
    *,
    name: str,
    gates: Sequence[Float[Array, "n H"]],
    next_tile: Callable[[Any, Token], Any],
    interpret: Any,
) -> tuple[Float[Array, "Q G D W"], Float[Array, "n H F"]]:
    """`reference.one_token`; next_tile: (columns of a state [D, WIDTH], the token) → these columns after it.

    Tokens have q and k [n, N, D], and v of n H F numbers.
    """
    num_slots, num_states, key_dim, num_columns = states.shape
    tokens, shape = rows.tokens, (rows.slots.size, heads.num, heads.value_dim)
    tile_shape, layout = (key_dim, WIDTH), _layout()
    exists = jnp.arange(rows.slots.size) < number

    def body(states_ref, slots_ref, begins_ref, q_ref, k_ref, v_ref, *refs):
        *gate_refs, out_ref = refs
        row, head, part = (lax.axis_index(each) for each in ("row", "head", "part"))
        slot = slots_ref[row]

        def in_columns(ref):
            key = ref.at[row, head // heads.of_key]
            x = load(key, layout=layout.reduce(1), optimized=False)
            return lax.broadcast_in_dim(x, tile_shape, [0])

        @pl.when(slot >= 0)
        def _():
            state, own = slot * num_states + head // heads.in_state, piece(part, WIDTH)
            first = head % heads.in_state * heads.value_dim + part * WIDTH
            tile = states_ref.at[state, :, pl.ds(pl.multiple_of(first, WIDTH), WIDTH)]
            old = load(tile, layout=layout, optimized=False)
            v = load(v_ref.at[row, head, own], layout=layout.reduce(0), optimized=False)
            token = Token(in_columns(k_ref), v, tuple(ref[row, head] for ref in gate_refs))
            query = in_columns(q_ref)
            is_new = lax.broadcast_in_dim(begins_ref[row] > 0, tile_shape, [])
            new = next_tile(jnp.where(is_new, jnp.zeros_like(old), old), token)
            store(tile, new)
            store(out_ref.at[row, head, own], jnp.sum(new * query, axis=0))

    kernel = pl.kernel(  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        mesh=plgpu.Mesh(
            grid=(*shape[:2], heads.value_dim // WIDTH), grid_names=("row", "head", "part")
        ),
        name=name,
        interpret=interpret or False,
    )
    # A reference, since a kernel changes in place what it is given as such.
    ref = jax.new_ref(states.reshape(num_slots * num_states, key_dim, num_columns))
    slots = jnp.where(exists, rows.slots, -1)
    begins = rows.begins.astype(jnp.int32)
    given = (slots, begins, tokens.q, tokens.k, tokens.v.reshape(shape), *gates)
    out = kernel(ref, *given)  # pyright: ignore[reportCallIssue] (jax 0.10)
    return jax.freeze(ref).reshape(states.shape), out


def in_rows(x: Any, like: Any) -> Any:
    """[WIDTH] as the rows of a tile."""
    return lax.broadcast_in_dim(x, like.shape, [1])


def _layout() -> Any:
    """Of a tile: a warp has two of eight rows, 16 threads with four columns each have one."""
    tiling = plgpu.Tiling(((LINES, WIDTH), (2, WIDTH), (4,)))  # pyright: ignore[reportAttributeAccessIssue]
    return plgpu.Layout.TILED(  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)
        tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )
