"""Products with quantized weights on TPUs (Mosaic): the weight is read from HBM in 8 or 4 bits and converted in VMEM.

A grid of (tile of tokens, tile of outputs); a tile of tokens stays in VMEM while the weight streams through, two tiles
of outputs at a time, each with all its inputs. Weights are converted to integers that bfloat16 represents exactly, or
to fp8's values, so they are never rounded, and scales multiply float32 sums: of an output (int8, fp8), or of a group
(int4), minus its zero times the sum of the group's x.

The sum of an output is over chunks of inputs in an order that depends only on the weight's shape: a row's result does
not depend on the number of rows, as long as the MXU's does not.

Letters: T tokens, E inputs, F outputs, J groups of int4, G = E / J.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.quant_matmul.quantized import MIDDLE, QuantizedWeight, padded, round_rows

LANES = 128
X_BYTES = 12 << 20  # per tile of x, at most
TILE_BYTES = 5 << 20  # per weight tile, at most; two of both and of the result: at most 40 MB
CHUNK = 1024  # inputs converted at a time. Sums are divided there, so it is never tuned
VMEM_BYTES = 48 << 20  # of at least 64 MB
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    tile_tokens, tile_out: tokens and outputs per tile, LANES times a power of two; halved until they fit. several: with
    fewer tokens than LANES, the least number of tiles of outputs.
    """

    tile_tokens: int = 256
    tile_out: int = 512
    several: int = 8


DEFAULT = TileSizes()


def unsupported_reason(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why the kernel does not support this dtype of x, in one line; None if it does. Needs only shapes and dtypes."""
    if dtype != jnp.bfloat16:
        return f"x is {dtype}; the kernel reads bfloat16"
    if round_x and weight.format != "int8":
        return f"x is rounded for int8 weights, and this one is {weight.format}"
    num_in = weight.shape[1]
    if weight.format == "int4":
        if weight.group_size not in GROUP_SIZES:
            return f"groups have {weight.group_size} inputs, none of {GROUP_SIZES}"
        if num_in % (2 * LANES):
            return f"{num_in} inputs are no multiple of {2 * LANES}, in two halves of bytes"
    elif num_in % LANES:
        return f"{num_in} inputs are no multiple of {LANES}"
    if LANES * weight.data.shape[1] > TILE_BYTES or LANES * num_in * 2 > X_BYTES:
        return f"{num_in} inputs of a tile do not fit into VMEM"
    return None


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    axis_name: str | None = None,
    sizes: TileSizes = DEFAULT,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "T F"]:
    """Same contract as `reference.quant_matmul`; x is bfloat16. Raises NotImplementedError with the reason.

    `axis_name`: the mesh axis whose devices have parts of the same rows of x.
    """
    if reason := unsupported_reason(x.dtype, weight, round_x=round_x):
        raise NotImplementedError(reason)
    num_tokens, x = x.shape[0], padded(x, weight)
    by_token: list[jax.Array] = []
    if round_x:
        x, row_scale = round_rows(x, axis_name)
        by_token = [row_scale]
    sublanes = 32 // x.dtype.itemsize
    tile_tokens = _tile(sizes.tile_tokens, X_BYTES // (2 * x.shape[1]))
    tile_tokens = min(tile_tokens, pl.cdiv(num_tokens, sublanes) * sublanes)
    fill = (0, -num_tokens % tile_tokens)
    x, *by_token = (jnp.pad(array, (fill, (0, 0))) for array in (x, *by_token))
    by_out = [weight.scale.reshape(-1, weight.shape[0])]
    if weight.zero is not None:
        by_out.append(weight.zero)
    tiles = tile_tokens, _tile_out(weight, tile_tokens, sizes)
    return _call(x, by_token, weight, by_out, tiles, interpret)[:num_tokens]


def _call(x, by_token, weight: QuantizedWeight, by_out, tiles: tuple[int, int], interpret):
    """x [T, E] and [T, 1] with T a multiple of the tile; arrays per output: [1 or J, F]."""
    (num_out, width), (tile_tokens, tile_out) = weight.data.shape, tiles
    body, scratch = _body(x, weight, tile_tokens, tile_out)
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // tile_tokens, pl.cdiv(num_out, tile_out)),
        in_specs=[
            pl.BlockSpec((tile_tokens, x.shape[1]), lambda t, o: (t, 0)),
            *(pl.BlockSpec((tile_tokens, 1), lambda t, o: (t, 0)) for _ in by_token),
            pl.BlockSpec((tile_out, width), lambda t, o: (o, 0)),
            *(pl.BlockSpec((each.shape[0], tile_out), lambda t, o: (0, o)) for each in by_out),
        ],
        out_specs=pl.BlockSpec((tile_tokens, tile_out), lambda t, o: (t, o)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], num_out), jnp.float32),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="quant_matmul",
    )(x, *by_token, weight.data, *by_out)


def _tile_out(weight: QuantizedWeight, tile_tokens: int, sizes: TileSizes) -> int:
    """Outputs per tile: many if the MXU is the bound. With few tokens the weight's bytes are the bound, and the first
    tile's load overlaps with nothing: then there should be several tiles.
    """
    num_out, width = weight.data.shape
    fitting = TILE_BYTES // width
    if tile_tokens < LANES:
        fitting = min(fitting, num_out // sizes.several)
    return min(_tile(sizes.tile_out, fitting), pl.cdiv(num_out, LANES) * LANES)


def _tile(most: int, fitting: int) -> int:
    """`most`, halved until it fits; at least LANES."""
    while most > max(LANES, fitting):
        most //= 2
    return most


def _body(x, weight: QuantizedWeight, tile_tokens: int, tile_out: int) -> tuple[Callable, list]:
    """The kernel for the format, and its scratch buffers."""
    if weight.format == "int4":
        body = partial(_int4, group_size=weight.group_size)
        zeros = pltpu.VMEM((weight.scale.shape[0], tile_out), jnp.float32)
        return body, [] if weight.zero is None else [zeros]
    if x.dtype == jnp.int8:
        return _int8_product, [pltpu.VMEM((tile_tokens, tile_out), jnp.int32)]
    return _weight_only, []


def _for_chunks(num_in: int, act: Callable) -> None:
    """Calls `act` on slices of inputs, all of one size and in order."""
    size = max(n for n in range(LANES, CHUNK + 1, LANES) if num_in % n == 0)

    def one(index, _):
        act(pl.ds(pl.multiple_of(index * size, LANES), size))
        return 0

    lax.fori_loop(0, num_in // size, one, 0)


def _dot(x, w, dtype):
    """x [T, E] times w [F, E] transposed."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _weight_only(x_ref, w_ref, scale_ref, out_ref):
    """int8 and fp8."""
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    def add(chunk):
        out_ref[...] += _dot(x_ref[:, chunk], _widen(w_ref[:, chunk]), jnp.float32)

    _for_chunks(x_ref.shape[1], add)
    out_ref[...] *= scale_ref[...]


def _widen(w):
    if w.dtype != jnp.int8:
        return w.astype(jnp.bfloat16)
    return w.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)


def _int8_product(x_ref, row_scale_ref, w_ref, scale_ref, out_ref, sum_ref):
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.int32)

    def add(chunk):
        sum_ref[...] += _dot(x_ref[:, chunk], w_ref[:, chunk], jnp.int32)

    _for_chunks(x_ref.shape[1], add)
    out_ref[...] = sum_ref[...].astype(jnp.float32) * row_scale_ref[...] * scale_ref[...]


def _int4(x_ref, w_ref, scale_ref, *refs, group_size: int):
    """128 bytes of an output at a time: one pair of groups, or several smaller ones.

    refs: the result; or zeros, the result, and scratch for zeros.
    """
    out_ref = refs[len(refs) // 2]
    if len(refs) == 3:  # single rows of bytes are not addressable
        refs[2][...] = refs[0][...].astype(jnp.int32).astype(jnp.float32)
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
    pairs = LANES // group_size

    def add(index, _):
        planes = _planes(w_ref[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)])
        x = x_ref[:, pl.ds(pl.multiple_of(index * 2 * LANES, LANES), 2 * LANES)]
        total = out_ref[...]
        for number in range(2 * pairs):
            first = number // 2 * group_size
            x_group = x[:, number * group_size : (number + 1) * group_size]
            w_group = planes[number % 2][:, first : first + group_size]
            row = pl.ds(index * 2 * pairs + number, 1)
            sums = x_group.astype(jnp.float32).sum(axis=1, keepdims=True)
            zero = refs[2][row, :] if len(refs) == 3 else float(MIDDLE)
            part = _dot(x_group, w_group, jnp.float32) - sums * zero
            total += part * scale_ref[row, :]
        out_ref[...] = total
        return 0

    lax.fori_loop(0, w_ref.shape[1] // LANES, add, 0)


def _planes(data: jax.Array) -> list[jax.Array]:
    """The low and the high halves of bytes, as bfloat16."""
    words = pltpu.bitcast(data, jnp.uint32)
    halves = (words & jnp.uint32(0x0F0F0F0F), (words >> 4) & jnp.uint32(0x0F0F0F0F))
    integers = [pltpu.bitcast(half, jnp.uint8).astype(jnp.int32) for half in halves]
    return [each.astype(jnp.float32).astype(jnp.bfloat16) for each in integers]
