"""Rotary embeddings on a TPU: heads are rotated where they lie, side by side in the lanes of their token.

A dimension's partner is some lanes away, and registers rotate. XLA would make the tokens lanes for that, and transpose
back; or pad, merge and copy halves of registers. Letters: T tokens, N heads, D their dimensions, L lanes of the fewest
heads that are whole registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_tpu import LANES

ROWS = 16  # tokens that are rotated at once: a register of bfloat16
MOST_TOKENS = 256  # of a tile
VMEM_BYTES = 32 << 20


def unsupported_reason(heads: Sequence[int], head_dim: int, dtype: Any) -> str | None:
    """Why the kernel cannot serve arrays of so many heads; None if it can."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"heads are {dtype}; the kernel reads bfloat16 or float32"
    lanes = math.lcm(head_dim, LANES)
    for each in heads:
        if each * head_dim % lanes:
            return f"{each} heads of {head_dim} dimensions are not whole registers of {LANES}"
    needed = ROWS * _bytes_of_token(sum(heads) * head_dim, lanes, dtype)
    if needed > VMEM_BYTES // 2:
        return f"{ROWS} tokens take {needed >> 20} MB of VMEM with their buffers"
    return None


def rotate(
    parts: Sequence[Float[Array, "T N D"]],
    cos: Float[Array, "T 1 half"],
    sin: Float[Array, "T 1 half"],
    *,
    interleaved: bool = False,
    interpret: pltpu.InterpretParams | bool = False,
) -> list[Float[Array, "T N D"]]:
    """`reference.rotate`, computed in float32. Raises NotImplementedError with the reason of `unsupported_reason`."""
    num_tokens, _, head_dim = parts[0].shape
    given = [x.reshape(num_tokens, -1) for x in parts]
    made = [_Made(i, 0, x.shape[1], True) for i, x in enumerate(parts)]
    return _call(given, made, head_dim, (cos, sin), interleaved, interpret)


def split_and_rotate(
    joined: Float[Array, "T N*D"],
    cos: Float[Array, "T 1 half"],
    sin: Float[Array, "T 1 half"],
    *,
    heads: tuple[int, int, int],
    interleaved: bool = False,
    interpret: pltpu.InterpretParams | bool = False,
) -> list[Float[Array, "T N D"]]:
    """`reference.split_and_rotate`, likewise."""
    firsts = np.cumsum([0, *heads]).tolist()
    made = [_Made(0, firsts[i], heads[i], i < 2) for i in range(3)]
    head_dim = joined.shape[1] // sum(heads)
    return _call([joined], made, head_dim, (cos, sin), interleaved, interpret)


class _Made(NamedTuple):
    """A result: heads of one of the given arrays."""

    given: int
    first: int
    num_heads: int
    is_rotated: bool  # else copied


def _call(given, made: list[_Made], head_dim: int, angles: tuple, interleaved: bool, interpret):
    num_tokens, dtype = given[0].shape[0], given[0].dtype
    lanes, half = math.lcm(head_dim, LANES), angles[0].shape[-1]
    if reason := unsupported_reason([each.num_heads for each in made], head_dim, dtype):
        raise NotImplementedError(reason)
    shift = 1 if interleaved else half
    # Both partners may be equally far away in a register: then one rotation brings both.
    is_one = 2 * shift == lanes
    factors = _factors(angles, head_dim, lanes, interleaved=interleaved, is_one=is_one)
    of_token = _bytes_of_token(sum(each.num_heads for each in made) * head_dim, lanes, dtype)
    tokens = MOST_TOKENS
    while tokens > ROWS and tokens * of_token > VMEM_BYTES // 2:
        tokens //= 2
    tokens = min(tokens, -(-num_tokens // ROWS) * ROWS)

    def rotated(x, cos, sines):
        out = x * cos
        for distance, sin in zip((shift, lanes - shift), sines, strict=False):
            out += pltpu.roll(x, distance, 1) * sin
        return out

    def kernel(*refs):
        factor_refs, refs = refs[: len(factors)], refs[len(factors) :]
        given_refs, made_refs = refs[: len(given)], refs[len(given) :]

        def rotate_rows(index, _):
            rows = pl.ds(pl.multiple_of(index * ROWS, ROWS), ROWS)
            cos, *sines = (ref[rows] for ref in factor_refs)
            for each, made_ref in zip(made, made_refs, strict=True):
                for at in range(0, each.num_heads * head_dim, lanes):
                    x = given_refs[each.given][rows, pl.ds(each.first * head_dim + at, lanes)]
                    if each.is_rotated:
                        x = rotated(x.astype(jnp.float32), cos, sines).astype(dtype)
                    made_ref[rows, pl.ds(at, lanes)] = x

        lax.fori_loop(0, tokens // ROWS, rotate_rows, None)

    def tile(width):
        return pl.BlockSpec((tokens, width), lambda index: (index, 0))

    widths = [each.num_heads * head_dim for each in made]
    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_tokens, tokens),),
        in_specs=[tile(x.shape[1]) for x in (*factors, *given)],
        out_specs=[tile(width) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((num_tokens, width), dtype) for width in widths],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="rope",
    )(*factors, *given)
    return [x.reshape(num_tokens, -1, head_dim) for x in out]


def _factors(angles: tuple, head_dim: int, lanes: int, *, interleaved: bool, is_one: bool):
    """float32[T, L] each: of a dimension itself, of the one that lies `shift` lanes before it, and of the one that lies
    as far behind. `is_one`: these two are the same.
    """
    (cos, sin), dim = angles, np.arange(head_dim)
    half = cos.shape[-1]
    is_first = dim % 2 == 0 if interleaved else dim < half
    is_rotated = dim < 2 * half

    def of_head(values, of_rest):
        values = values[:, 0].astype(jnp.float32)
        both = jnp.repeat(values, 2, axis=1) if interleaved else jnp.tile(values, (1, 2))
        return jnp.pad(both, ((0, 0), (0, head_dim - 2 * half)), constant_values=of_rest)

    own, other = of_head(cos, 1.0), of_head(sin, 0.0)
    before = jnp.where(is_rotated & ~is_first, other, 0.0)
    behind = jnp.where(is_rotated & is_first, -other, 0.0)
    found = [own, before + behind] if is_one else [own, before, behind]
    return [jnp.tile(x, (1, lanes // head_dim)) for x in found]


def _bytes_of_token(width: int, lanes: int, dtype) -> int:
    """VMEM of a token in a block: its heads twice on their way in and twice on their way out, and factors."""
    return 4 * width * jnp.dtype(dtype).itemsize + 2 * 3 * 4 * lanes
