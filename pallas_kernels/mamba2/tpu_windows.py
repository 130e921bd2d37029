"""Mamba-2 for rows of several tokens on a TPU: the states stay in VMEM from a row's first to last window.

A step of the grid has some heads of a key and one part: the tokens of a row in a window, of which other tokens are
zeros there. Its products with the state are of all heads at once; those of tokens with each other are of one head, and
of 128 lanes: where heads are narrower, each product has the values of several, and lanes are chosen afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Parts
from pallas_kernels.delta_rule.tpu_windows import Decays, Own, decays, own_tokens, product
from pallas_kernels.mamba2.reference import Tokens
from pallas_kernels.mosaic_tpu import LANES

MOST_LANES = 1024  # of a step's states


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array, num_values: int) -> str | None:
    """Why the kernel cannot serve states of this shape, of so many heads for each key; None if it can."""
    *_, key_dim, num_columns = states.shape
    width = num_columns // num_values
    if key_dim % LANES or num_columns % LANES or (LANES % width and width % LANES):
        return (
            f"states of {key_dim} x {num_values} x {width} are not whole registers of {LANES} lanes"
        )
    if _heads(num_values, width) is None:
        return f"{num_values} heads of {width} cannot be divided into steps of {MOST_LANES} lanes"
    return None


def _heads(num_values: int, width: int) -> int | None:
    """How many heads a step has; None if there is no such number."""
    fits = (n for n in range(num_values, 0, -1) if num_values % n == 0)
    return next((n for n in fits if n * width <= MOST_LANES and n * width % LANES == 0), None)


def by_windows(
    states: Float[Array, "Q N D V"],
    windows: Tokens,
    parts: Parts,
    number: Int[Array, ""],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "Q N D V"], Float[Array, "W C N V"]]:
    """As `delta_rule.reference.by_windows`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    num_windows, size, num_keys, num_values = windows.log_decay.shape
    if reason := unsupported_reason(states, num_values):
        raise NotImplementedError(reason)
    key_dim, num_columns = states.shape[2:]
    width = num_columns // num_values
    heads = _heads(num_values, width)
    assert heads is not None
    num_blocks, lanes = num_values // heads, heads * width
    total = jnp.cumsum(windows.log_decay, axis=1)
    before = total - windows.log_decay

    def by_block(x: jax.Array) -> jax.Array:
        """[N, blocks, W, C, heads]"""
        return x.reshape(num_windows, size, num_keys, num_blocks, heads).transpose(2, 3, 0, 1, 4)

    # All heads of a token side by side, as XLA has them.
    side_by_side = (num_windows, size, -1)
    given = (
        *(x.reshape(side_by_side) for x in (windows.q, windows.k, windows.v)),
        by_block(total),
        by_block(before),
        by_block(total).swapaxes(-1, -2),
    )

    def place(step: Any) -> tuple[Any, Any]:
        """The key and the block of a step."""
        return step // num_blocks, step % num_blocks

    keys = pl.BlockSpec(
        (None, size, key_dim), lambda step, part, window, *_: (window[part], 0, place(step)[0])
    )
    values = pl.BlockSpec(
        (None, size, lanes), lambda step, part, window, *_: (window[part], 0, step)
    )

    def of_heads(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, *shape),
            lambda step, part, window, *_: (*place(step), window[part], 0, 0),
        )

    of_states = pl.BlockSpec(
        (None, None, key_dim, lanes),
        lambda step, part, window, first, end, kept_end, slots, *_: (
            slots[part],
            place(step)[0],
            0,
            place(step)[1],
        ),
    )
    scalars = (x.astype(jnp.int32) for x in parts)
    new_states, out = pl.pallas_call(
        _body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(num_keys * num_blocks, jnp.maximum(number, 1)),
            in_specs=[
                *(of_states, keys, keys, values),
                *(of_heads(size, heads), of_heads(size, heads), of_heads(heads, size)),
            ],
            out_specs=[of_states, values],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(given[2].shape, jnp.float32),
        ],
        input_output_aliases={8: 0},
        interpret=interpret,
        name="mamba2_windows",
    )(*scalars, number[None], states, *given)
    return new_states, out.reshape(windows.v.shape)


class _Refs(NamedTuple):
    """Of the kernel: the parts, then of one step states [D, lanes], keys [C, D], values [C, lanes]."""

    window: Any
    first: Any
    end: Any
    kept_end: Any
    slots: Any
    is_first: Any
    begins: Any
    number: Any
    states: Any
    q: Any
    k: Any
    v: Any
    total: Any  # [C, heads]: the sums of log decays up to each token of the window
    before: Any  # [C, heads]: the same without its own
    total_in_lanes: Any  # [heads, C]
    new_states: Any
    out: Any  # values


def _body(*given: Any) -> None:
    refs = _Refs(*given)
    part = pl.program_id(1)

    @pl.when(part < refs.number[0])
    def _():
        (size, lanes), heads, zero = refs.v.shape, refs.total.shape[1], jnp.zeros((), jnp.float32)
        own = own_tokens(refs.first[part], refs.end[part], refs.kept_end[part], size)
        is_new_window = (part == 0) | (refs.window[jnp.maximum(part - 1, 0)] != refs.window[part])
        stored = jnp.where(refs.begins[part] > 0, zero, refs.states[...])
        old = jnp.where(refs.is_first[part] > 0, stored, refs.new_states[...])
        q, k = (jnp.where(own.tokens, x[...], zero) for x in (refs.q, refs.k))
        scores, seen = product(q, k, 1, 1), product(q, old, 1, 0)
        found = [_decays(refs, own, head) for head in range(heads)]
        outputs, left, whole = [], [], []
        for start in range(0, lanes, LANES):
            some = [
                (start + lane) * heads // lanes
                for lane in range(0, LANES, min(LANES, lanes // heads))
            ]
            tile = pl.ds(start, LANES)
            each = [found[head] for head in some]
            values = refs.v[:, tile]
            inner = _chosen([product(scores * x.between, values, 1, 0) for x in each])
            since = _chosen([x.since for x in each])
            outputs.append(inner + since * seen[:, start : start + LANES])
            left.append(_chosen([x.left for x in each]) * values)
            whole.append(_chosen([x.whole for x in each]))
        added = product(k, jnp.concatenate(left, axis=1), 0, 0)
        refs.new_states[...] = old * jnp.concatenate(whole, axis=1) + added
        others = jnp.where(is_new_window, zero, refs.out[...])
        refs.out[...] = jnp.where(own.tokens, jnp.concatenate(outputs, axis=1), others)


def _decays(refs: _Refs, own: Own, head: int) -> Decays:
    one = pl.ds(head, 1)
    return decays(own, refs.total[:, one], refs.before[:, one], refs.total_in_lanes[one])


def _chosen(of_heads: list[jax.Array]) -> jax.Array:
    """128 lanes, equally many from each [..., 1 or 128]."""
    shape = (of_heads[0].shape[0], LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    found = jnp.broadcast_to(of_heads[0], shape)
    for number, x in enumerate(of_heads[1:], start=1):
        begins = number * (LANES // len(of_heads))
        found = jnp.where(lane >= begins, jnp.broadcast_to(x, shape), found)
    return found
