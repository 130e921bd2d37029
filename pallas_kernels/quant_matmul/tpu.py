"""Products with quantized weights on TPUs (Mosaic): the weight is read from HBM in 8 or 4 bits and converted in VMEM.

A grid of (tile of tokens, tile of outputs). A tile of tokens stays in VMEM while the weight streams through, two tiles
of outputs at a time, each with all its inputs: tiles of tokens are large, since the weight is read once for each.

`tpu_tile.py` multiplies tiles. With more than LANES tokens, scaling the sums of groups takes more operations than
scaling their weights, and sums of so few inputs leave half of an MXU idle: weights with groups are then scaled and
rounded. Bias and cast come last, in the kernel: a result in bfloat16 is half the bytes of the sums.

Among up to LANES rows, and among more, a row's result does not depend on their number, as long as the MXU's does not.

Letters: T tokens, E inputs, F outputs, J groups, G = E / J.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, padded, round_rows
from pallas_kernels.quant_matmul.tpu_tile import (
    Operands,
    Scratch,
    product,
    scratch_of,
    unsupported_weight,
)

X_BYTES = 28 << 20  # of tiles of x in VMEM, at most
# Per weight tile, at most. Two of both and of the result, and sums: at most 48 MB.
TILE_BYTES = 7 << 20
# Of at least 64 MB: those 48, and scales and zeros of groups. With one buffer of x, tiles of results are larger, and
# scaled weights and spilled registers need room.
VMEM_BYTES, VMEM_BYTES_OF_ONE = 52 << 20, 56 << 20


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    tile_tokens, tile_out: most tokens and outputs per tile, LANES times a power of two; halved until they fit.
    least_tiles: of outputs, with fewer tokens than LANES.
    """

    tile_tokens: int = 1024
    tile_out: int = 512
    least_tiles: int = 8


DEFAULT = TileSizes()


def unsupported_reason(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why the kernel does not support this dtype of x, in one line; None if it does. Needs only shapes and dtypes."""
    if reason := unsupported_weight(dtype, weight, round_x=round_x):
        return reason
    num_in = weight.shape[1]
    if LANES * weight.data.shape[1] > TILE_BYTES or LANES * num_in * 2 * 2 > X_BYTES:
        return f"{num_in} inputs of a tile do not fit into VMEM"
    return None


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
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
    row_scale = None
    if round_x:
        x, row_scale = round_rows(x, axis_name)
    fill = ((0, max(0, _sublanes(x) - num_tokens)), (0, 0))  # one register
    x = jnp.pad(x, fill)
    operands = Operands(
        x=x,
        data=weight.data,
        scale=weight.scale.reshape(-1, weight.shape[0]),
        row_scale=None if row_scale is None else jnp.pad(row_scale, fill),
        zero=weight.zero,
    )
    bias = None if bias is None else bias[None]
    tiles = tiles_of(x, weight, sizes)
    x_buffers = _x_buffers(x, weight, sizes)
    return _call(operands, bias, weight, tiles, x_buffers, jnp.dtype(dtype), interpret)[:num_tokens]


def tiles_of(x: jax.Array, weight: QuantizedWeight, sizes: TileSizes) -> tuple[int, int]:
    """Tokens and outputs of a tile. x as the kernel reads it: padded, and rounded if it is to be.

    Tiles of tokens are about equally large, so few rows are multiplied in vain. Of outputs there are many if the MXU is
    the bound. With few tokens the weight's bytes are the bound, and the first tile's load overlaps with nothing: then
    there should be several tiles.
    """
    (num_tokens, num_in), (num_out, width) = x.shape, weight.data.shape
    row_bytes = num_in * x.dtype.itemsize * _x_buffers(x, weight, sizes)
    num_tiles = pl.cdiv(num_tokens, _halved(sizes.tile_tokens, X_BYTES // row_bytes))
    sublanes = _sublanes(x)
    tile_tokens = pl.cdiv(pl.cdiv(num_tokens, num_tiles), sublanes) * sublanes
    fitting = TILE_BYTES // width
    if tile_tokens < LANES:
        fitting = min(fitting, num_out // sizes.least_tiles)
    return tile_tokens, min(_halved(sizes.tile_out, fitting), pl.cdiv(num_out, LANES) * LANES)


def _x_buffers(x: jax.Array, weight: QuantizedWeight, sizes: TileSizes) -> int:
    """2, of which one is loaded while the other is multiplied; 1 if tiles of many inputs would have fewer tokens then:
    weights with groups are scaled for each tile of tokens, which takes longer than loading x.
    """
    num_tokens, num_in = x.shape
    fitting = _halved(sizes.tile_tokens, X_BYTES // (2 * num_in * x.dtype.itemsize))
    return 1 if weight.has_groups and min(num_tokens, sizes.tile_tokens) > fitting else 2


def _sublanes(x: jax.Array) -> int:
    """Rows of a register."""
    return 32 // x.dtype.itemsize


def _halved(most: int, fitting: int) -> int:
    """`most`, halved until it fits; at least LANES."""
    while most > max(LANES, fitting):
        most //= 2
    return most


def _call(
    arrays: Operands,
    bias: jax.Array | None,  # [1, F]
    weight: QuantizedWeight,
    tiles: tuple[int, int],
    x_buffers: int,
    dtype: jnp.dtype,
    interpret,
) -> jax.Array:
    x, num_out, (tile_tokens, tile_out) = arrays.x, weight.shape[0], tiles

    def of_tokens(array, **mode):
        if array is not None:
            return pl.BlockSpec((tile_tokens, array.shape[1]), lambda t, o: (t, 0), **mode)

    def of_outputs(array):
        if array is not None:
            return pl.BlockSpec((array.shape[0], tile_out), lambda t, o: (0, o))

    specs = Operands(
        x=of_tokens(x, pipeline_mode=pl.Buffered(x_buffers)),
        data=pl.BlockSpec((tile_out, arrays.data.shape[1]), lambda t, o: (o, 0)),
        scale=of_outputs(arrays.scale),
        row_scale=of_tokens(arrays.row_scale),
        zero=of_outputs(arrays.zero),
    )
    scales = x.shape[0] > LANES
    return pl.pallas_call(
        partial(_body, group_size=weight.group_size if weight.has_groups else None, scales=scales),
        grid=(pl.cdiv(x.shape[0], tile_tokens), pl.cdiv(num_out, tile_out)),
        in_specs=(specs, of_outputs(bias)),
        out_specs=pl.BlockSpec((tile_tokens, tile_out), lambda t, o: (t, o)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], num_out), dtype),
        scratch_shapes=(scratch_of(arrays, tiles),),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=VMEM_BYTES if x_buffers == 2 else VMEM_BYTES_OF_ONE,
        ),
        interpret=interpret,
        name="quant_matmul",
    )(arrays, bias)


def _body(
    refs: Operands,
    bias_ref,
    out_ref,
    scratch: Scratch,
    *,
    group_size: int | None,
    scales: bool,
):
    out = product(refs, scratch, group_size=group_size, scales=scales)
    if bias_ref is not None:
        out = out + bias_ref[...].astype(jnp.float32)
    out_ref[...] = out.astype(out_ref.dtype)
