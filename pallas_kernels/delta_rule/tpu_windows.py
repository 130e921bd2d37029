"""The gated delta rule for rows of several tokens on a TPU: the states stay in VMEM from a row's first to last window.

A step of the grid has some heads and one part: the tokens of a row in a window. Other tokens of the window are zeros
there, so each part is a chunk of its own: a triangular system of the keys, solved by products, then the products with
the state (https://arxiv.org/abs/2406.06484). Products of float32 are three of bfloat16, within 2^-16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Parts, Tokens
from pallas_kernels.mosaic_tpu import LANES

MOST_STATES = 8  # of a step, whose chains of products overlap


def unsupported_reason(states: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot serve states of this shape; None if it can."""
    *_, num_values, key_dim, value_dim = states.shape
    if key_dim % LANES or value_dim % LANES:
        return f"states of {key_dim} x {value_dim} are not whole registers of {LANES} lanes"
    if num_values * key_dim * value_dim > MOST_STATES * LANES * LANES:
        return f"{num_values} states of {key_dim} x {value_dim} for a key take too much VMEM"
    return None


def by_windows(
    states: Float[Array, "Q N J D F"],
    windows: Tokens,
    parts: Parts,
    number: Int[Array, ""],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "W C N J F"]]:
    """`reference.by_windows`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    if reason := unsupported_reason(states):
        raise NotImplementedError(reason)
    _, num_keys, num_values, key_dim, value_dim = states.shape
    num_windows, size = windows.q.shape[:2]
    most = MOST_STATES * LANES * LANES // (num_values * key_dim * value_dim)
    heads = next(n for n in range(most, 0, -1) if num_keys % n == 0)
    total = jnp.cumsum(windows.log_decay, axis=1)
    before = total - windows.log_decay

    def columns(x: jax.Array) -> jax.Array:
        """[N, W, C, J]"""
        return x.transpose(2, 0, 1, 3)

    given = (
        *(x.transpose(2, 0, 1, 3) for x in (windows.q, windows.k)),  # [N, W, C, D]
        windows.v.transpose(2, 0, 3, 1, 4),  # [N, W, J, C, F]
        *map(columns, (total, before, windows.beta)),
        total.transpose(2, 0, 3, 1),  # [N, W, J, C]
    )

    def of_window(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (heads, None, *shape), lambda head, part, window, *_: (head, window[part], *zeros)
        )

    keys, gates = of_window(size, key_dim), of_window(size, num_values)
    values = of_window(num_values, size, value_dim)
    of_states = pl.BlockSpec(
        (None, heads, num_values, key_dim, value_dim),
        lambda head, part, window, first, end, kept_end, slots, *_: (slots[part], head, 0, 0, 0),
    )
    out_shape = (num_keys, num_windows, num_values, size, value_dim)
    scalars = (x.astype(jnp.int32) for x in parts)
    new_states, out = pl.pallas_call(
        _body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(num_keys // heads, jnp.maximum(number, 1)),
            in_specs=[
                *(of_states, keys, keys, values, gates, gates, gates),
                of_window(num_values, size),
            ],
            out_specs=[of_states, values],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(out_shape, jnp.float32),
        ],
        input_output_aliases={8: 0},
        interpret=interpret,
        name="delta_rule_windows",
    )(*scalars, number[None], states, *given)
    return new_states, out.transpose(1, 3, 0, 2, 4)


class _Refs(NamedTuple):
    """Of the kernel: the parts, then of one step states [heads, J, D, F], keys [heads, C, D], gates [heads, C, J], and
    values [heads, J, C, F].
    """

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
    total: Any  # gates: the sums of log decays up to each token of the window
    before: Any  # gates: the same without its own
    beta: Any  # gates
    total_in_lanes: Any  # [heads, J, C]
    new_states: Any
    out: Any  # values


class Own(NamedTuple):
    """The tokens of the part."""

    tokens: jax.Array  # bool[C, 1]
    visible: jax.Array  # bool[C, C]: which of them sees which
    kept: jax.Array  # bool[C, 1]: which of them change the state


def own_tokens(first: jax.Array, end: jax.Array, kept_end: jax.Array, size: int) -> Own:
    """Of a part in a window of `size` tokens."""
    column = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    is_own = (column >= first) & (column < end)
    visible = is_own & (lane >= first) & (lane <= column)
    return Own(is_own, visible, is_own & (column < kept_end))


class Decays(NamedTuple):
    """Of a value head."""

    since: jax.Array  # [C, 1]: of the state before the part until each token
    left: jax.Array  # [C, 1]: of each token until the last kept one; 0 behind it
    between: jax.Array  # [C, C]: of the second until the first
    whole: jax.Array  # [1, 1]: of the state before the part until its last kept token


def decays(own: Own, total: jax.Array, before: jax.Array, total_in_lanes: jax.Array) -> Decays:
    """total, before: [C, 1], the sums of log decays up to each token of the window, and without its own;
    total_in_lanes: [1, C].
    """
    zero = jnp.zeros((), jnp.float32)
    start = jnp.max(jnp.where(own.tokens, before, -jnp.inf), 0, keepdims=True)
    end = jnp.min(jnp.where(own.kept, total, jnp.inf), 0, keepdims=True)
    return Decays(
        since=jnp.exp(jnp.where(own.tokens, total - start, zero)),
        left=jnp.exp(jnp.where(own.kept, end - total, -jnp.inf)),
        between=jnp.exp(jnp.where(own.visible, total - total_in_lanes, -jnp.inf)),
        whole=jnp.exp(end - start),
    )


def _decays(refs: _Refs, own: Own, head: int, value: int) -> Decays:
    total, before = (ref[head, :, pl.ds(value, 1)] for ref in (refs.total, refs.before))
    return decays(own, total, before, refs.total_in_lanes[head, pl.ds(value, 1)])


def _body(*given: Any) -> None:
    """All heads take each step together: one's products have to wait for each other."""
    refs = _Refs(*given)
    part = pl.program_id(1)

    @pl.when(part < refs.number[0])
    def _():
        (heads, num_values, size), zero = refs.v.shape[:3], jnp.zeros((), jnp.float32)
        column = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
        own = own_tokens(refs.first[part], refs.end[part], refs.kept_end[part], size)
        is_own = own.tokens
        is_new_window = (part == 0) | (refs.window[jnp.maximum(part - 1, 0)] != refs.window[part])
        pairs = [(head, value) for head in range(heads) for value in range(num_values)]
        keys = [jnp.where(is_own, refs.k[head], zero) for head in range(heads)]
        queries = [jnp.where(is_own, refs.q[head], zero) for head in range(heads)]
        both = [jnp.concatenate(x, axis=0) for x in zip(keys, queries, strict=True)]
        products = [product(x, key, 1, 1) for x, key in zip(both, keys, strict=True)]  # [2 C, C]
        found = [_decays(refs, own, *pair) for pair in pairs]
        rates = [
            jnp.where(is_own, refs.beta[head, :, pl.ds(value, 1)], zero) for head, value in pairs
        ]
        systems = [
            jnp.where(lane < column, rate * products[head][:size] * decay.between, zero)
            for decay, rate, (head, _) in zip(found, rates, pairs, strict=True)
        ]
        inverses = _unit_lower_inverses(systems, column, lane)
        old = []
        for pair in pairs:
            stored = jnp.where(refs.begins[part] > 0, zero, refs.states[pair])
            old.append(jnp.where(refs.is_first[part] > 0, stored, refs.new_states[pair]))
        known = [
            product(both[head], state, 1, 0) for state, (head, _) in zip(old, pairs, strict=True)
        ]
        new = [
            product(inverse, rate * (refs.v[pair] - decay.since * seen[:size]), 1, 0)
            for inverse, decay, rate, seen, pair in zip(
                inverses, found, rates, known, pairs, strict=True
            )
        ]
        for n, (pair, decay) in enumerate(zip(pairs, found, strict=True)):
            added = product(decay.left * keys[pair[0]], new[n], 0, 0)
            refs.new_states[pair] = old[n] * decay.whole + added
        for n, (pair, decay) in enumerate(zip(pairs, found, strict=True)):
            outputs = product(products[pair[0]][size:] * decay.between, new[n], 1, 0)
            outputs += decay.since * known[n][size:]
            others = jnp.where(is_new_window, zero, refs.out[pair])
            refs.out[pair] = jnp.where(is_own, outputs, others)


def _unit_lower_inverses(
    systems: list[jax.Array], column: jax.Array, lane: jax.Array
) -> list[jax.Array]:
    """Of I + each of the systems, strictly lower triangular [C, C]: from blocks to blocks twice as large. With X the
    inverses of two and B what is below the first, left of the second, the inverse of both is X - X B X.
    """
    zero, one = (jnp.full((), x, jnp.float32) for x in (0, 1))

    def corner(lower: jax.Array, width: int) -> jax.Array:
        is_corner = (column // (2 * width) == lane // (2 * width)) & (
            column // width != lane // width
        )
        return jnp.where(is_corner, lower, zero)

    inverses = [jnp.where(column == lane, one, -corner(each, 1)) for each in systems]
    width = 2
    while width < systems[0].shape[0]:
        below = [
            product(corner(each, width), inverse, 1, 0)
            for each, inverse in zip(systems, inverses, strict=True)
        ]
        inverses = [
            inverse - product(inverse, each, 1, 0)
            for inverse, each in zip(inverses, below, strict=True)
        ]
        width *= 2
    return inverses


def product(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """The float32 product over an axis of each, in three products of bfloat16."""

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        high = x.astype(jnp.bfloat16)
        return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        axes = (((axis_a,), (axis_b,)), ((), ()))
        return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    return dot(a_high, b_high) + (dot(a_high, b_low) + dot(a_low, b_high))
