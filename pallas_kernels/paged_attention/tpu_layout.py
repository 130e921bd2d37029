"""How a TPU keeps the pool, and how the packed tokens of a step are brought to the paged attention kernel.

Plain jnp around the kernel of `tpu.py`, whose letters it shares: layouts, tile sizes, and what the kernel cannot do.
Knows nothing of copies and of what is computed.

A slot of the pool is one row of lanes, head after head, K before V. With K and V on an axis of their own, as elsewhere,
XLA turns the layout of any head_dim but 128 and 256 around, so that nothing is padded, and copies the whole pool to
turn it back for a kernel. As lanes nothing is padded either, and a head is a slice of lanes, not every (2K)-th row.
A head whose lanes begin or end within a register is read with its neighbours': queries are 0 there, and of the result
only the head's own lanes are taken. `scale_zero` has the slots as lanes, because scores have their keys there; of each
head a scale and a zero for K, then for V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool, quantize

Pool = Shaped[Array, "N S 2*K*D"] | QuantizedPool  # see `to_tpu`

LANES = 128
MOST_BLOCKS = 1 << 16  # whose ids have 2 bytes
SMEM_BYTES = 3 << 18  # of a block table; a core has 1 MB
VMEM_BYTES = 32 << 20  # of 64 MB and more
BLOCK_BYTES = 4 << 20  # two are in VMEM at once
KV_BUFFERS = 2
QUERY_BUFFERS = 2
CHUNK_BUFFERS = 8
UNROLLED_REGISTERS = 32  # of 64
UNROLLED_HEADS = 5
UNROLLED_SCORES = 256  # registers of a head
UNROLLED_BYTES = 4 << 20  # of widened keys and values, scores and weights
UNROLLED_BLOCKS = 16  # of a fetch
FETCH_BYTES = 1 << 20  # at least, as far as MOST_TILES are enough
MOST_TILES = 4  # of a fetch


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may differ from one kind of device to another (`tune.py`), but not within an engine: `tile_kv` and
    `tile_bytes` say where the sums of a row are cut. Fewer are taken where VMEM would not hold so many.

    tile_rows: A at most, flops that pay for reading a byte of KV. By their data sheets v5e does 240 meanwhile, TPU7x
    310, v6e 560. head_rows: K * A at most. tile_kv: B at most; tile_bytes: what such a tile has at most.
    """

    tile_rows: int = 256
    head_rows: int = 4096
    tile_kv: int = 512
    tile_bytes: int = 2 << 20


def to_tpu(pool: Array | QuantizedPool) -> Pool:
    """A pool as other platforms have it, `[N, S, 2*K, D]`, as this kernel wants it: `[N, S, 2*K*D]`.

    Beside it, for int8 and int4, `scale_zero` [N, S, 2*K, 2] as `[N, scale_rows(K) * K, S]`. For tests; an engine
    allocates it so.
    """
    if isinstance(pool, QuantizedPool):
        scale_zero = pool.scale_zero
        if scale_zero is not None:
            flat = _scales_of_slots(scale_zero, scale_rows(pool.shape[2] // 2))
            scale_zero = jnp.swapaxes(flat, 1, 2)
        return replace(pool, data=to_tpu(pool.data), scale_zero=scale_zero)
    return pool.reshape(*pool.shape[:2], -1)


def scale_rows(num_kv_heads: int) -> int:
    """Rows of `scale_zero` for each of the KV heads of a device: 4, or twice as many to fill registers of 8 rows.

    Of 12 rows, say, XLA would lay out an array in another order, so that nothing is padded, and turn it for each layer.
    """
    return 8 if num_kv_heads > 1 and num_kv_heads % 2 else 4


def _scales_of_slots(scale_zero: jax.Array, rows: int) -> jax.Array:
    """[..., 2*K, 2] → [..., rows * K]."""
    of_heads = scale_zero.reshape(*scale_zero.shape[:-2], -1, 4)
    widths = [(0, 0)] * (of_heads.ndim - 1) + [(0, rows - 4)]
    return jnp.pad(of_heads, widths).reshape(*scale_zero.shape[:-2], -1)


def unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool: Pool,
    num_kv_heads: int,
    table: tuple[int, ...],
    sizes: TileSizes | None = None,
) -> str | None:
    """The reason why the kernel cannot serve, None if it can.

    q: [T, H, D], of the dtype of keys too; table: the shape of the block table. Shapes and dtypes suffice. All of one
    device's share, if several share the heads.
    """
    stored, head_dim = data(pool).dtype, q.shape[2]
    format = pool.format if isinstance(pool, QuantizedPool) else None
    if q.dtype not in (jnp.bfloat16, jnp.float32) or (format is None and stored != q.dtype):
        return (
            f"the TPU kernel computes in bfloat16 or float32 and reads a pool of the same dtype or a quantised one; "
            f"queries are {q.dtype}, the pool is {stored}"
        )
    width = 2 * num_kv_heads * head_dim // (2 if format == "int4" else 1)
    if len(pool.shape) != 3 or pool.shape[2] != width or width % LANES:
        return (
            f"the TPU kernel reads a pool [num_blocks, block_size, {width}] for {num_kv_heads} KV heads of {head_dim}, "
            f"where the last axis must be a multiple of {LANES}; the pool is {list(pool.shape)}"
        )
    block_size, least = pool.shape[1], LANES if format in LEVELS else _chunk(stored)
    if block_size < least or block_size & (block_size - 1):
        return (
            f"the TPU kernel needs a block_size that is a power of two and at least {least} for this pool, "
            f"not {block_size}"
        )
    if (num_bytes := block_size * width * stored.itemsize) > BLOCK_BYTES:
        return (
            f"the TPU kernel takes two blocks of at most {BLOCK_BYTES} bytes at once, and one has {num_bytes}; "
            f"lower block_size (it is {block_size})"
        )
    return _why_no_memory(q, pool, num_kv_heads, table, sizes or TileSizes())


def _why_no_memory(q, pool: Pool, num_kv_heads: int, table, sizes: TileSizes) -> str | None:
    """The same, of what has to fit into the scalar memory and into VMEM."""
    block_size = pool.shape[1]
    if pool.shape[0] > MOST_BLOCKS:
        return (
            f"the TPU kernel keeps ids of blocks in 2 bytes, and there are {pool.shape[0]} blocks; raise block_size "
            f"(it is {block_size})"
        )
    if (num_bytes := 4 * table[0] * -(-table[1] // 2)) > SMEM_BYTES:
        return (
            f"a block table of {table[0]} rows and {table[1]} blocks takes {num_bytes} bytes of the scalar memory, of "
            f"which the TPU kernel gives it {SMEM_BYTES}; raise block_size (it is {block_size}), or lower max_num_seqs "
            f"or max_model_len"
        )
    least = shape_of(q, pool, num_kv_heads, table[1], sizes=sizes, one_query_per_row=True)
    if least.vmem_bytes > VMEM_BYTES:
        return (
            f"with {num_kv_heads} KV heads of {q.shape[2]} and blocks of {block_size} the TPU kernel needs "
            f"{least.vmem_bytes} bytes of VMEM, of which it may have {VMEM_BYTES}; lower block_size, or raise "
            f"tensor_parallel_size"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel is specialised for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    blocks_per_row: int
    tile_q: int
    dtype: jnp.dtype  # of q and of the result
    pool_dtype: jnp.dtype
    format: str | None
    scale_rows: int  # of a KV head in scale_zero; 0 if there is none
    mask: tuple[float, int | None, float | None]  # scale, window, soft_cap
    sizes: TileSizes

    @property
    def num_planes(self) -> int:
        return 2 if self.format == "int4" else 1

    @property
    def head_lanes(self) -> int:
        """Lanes that hold a head's K, or its V."""
        return self.head_dim // self.num_planes

    @property
    def width(self) -> int:
        """Lanes of a slot."""
        return 2 * self.num_kv_heads * self.head_lanes

    @property
    def period(self) -> int:
        """After this many heads lanes begin at the start of a register again."""
        return LANES // math.gcd(2 * self.head_lanes, LANES)

    @property
    def read_lanes(self) -> int:
        """W: whole registers, as many as any head's K or V lies in."""
        starts = range(0, 2 * self.period * self.head_lanes, self.head_lanes)
        widest = max(start % LANES + self.head_lanes for start in starts)
        return -(-widest // LANES) * LANES

    def lanes(self, head: int, value: bool) -> tuple[int, int]:
        """The first of the W lanes around a head's K or V, counted from its period; and where it begins among them."""
        start = (2 * (head % self.period) + value) * self.head_lanes
        last = 2 * self.period * self.head_lanes - self.read_lanes
        first = min(start // LANES * LANES, last)
        return first, start - first

    @property
    def stack(self) -> int:
        """KV heads whose queries share rows of registers: with one query per row a head alone may not fill 8 rows."""
        most = 8 // self.group if self.tile_q == 1 else 1
        most = max(1, min(most, UNROLLED_BYTES // self._room_of_keys))
        return max(n for n in range(1, most + 1) if self.num_kv_heads % n == 0)

    @property
    def num_stacks(self) -> int:
        return self.num_kv_heads // self.stack

    @property
    def rows(self) -> int:
        """A: queries times heads of a group times heads of a stack, padded to whole registers."""
        return -(-self.stack * self.group * self.tile_q // 8) * 8

    @property
    def heads_at_once(self) -> int:
        """KV heads that are unrolled, so that the arithmetic of one fills the waits of another; a divisor of K.

        With one query per row as many as have scores that registers hold. Else a few, whose scores are in VMEM in any
        case: with 4 a head takes 435 cycles on a v6e, with 2 517, alone 690. The rest is a loop, also for the
        compiler's sake.
        """
        least = math.lcm(self.period, self.stack)
        of_stack = self.rows // 8 * (self.fetch_kv // LANES)
        most = UNROLLED_REGISTERS // of_stack * self.stack
        if self.tile_q > 1:
            most = UNROLLED_HEADS if of_stack <= UNROLLED_SCORES else 1
        if self._room_of_stack > UNROLLED_BYTES:
            most = 1
        divisors = range(least, self.num_kv_heads + 1, least)
        return max(n for n in divisors if n <= max(least, most) and self.num_kv_heads % n == 0)

    @property
    def tile_kv(self) -> int:
        """B: whole blocks; the same for all programs of an engine."""
        most = self.sizes.tile_bytes // (self.width * self.pool_dtype.itemsize)
        fitting = max(LANES, min(self.sizes.tile_kv, most))
        return max(self.block_size, 1 << (fitting.bit_length() - 1))

    @property
    def tiles_of_fetch(self) -> int:
        """Tiles of keys that come at once, and are unrolled if all are there: with few heads a tile is soon computed.

        Where sums are cut does not depend on it.
        """
        if self.tile_q > 1:
            return 1
        of_tile = self.tile_kv * self.width * self.pool_dtype.itemsize
        return min(MOST_TILES, max(1, FETCH_BYTES // of_tile))

    @property
    def fetch_kv(self) -> int:
        return self.tiles_of_fetch * self.tile_kv

    @property
    def vmem_bytes(self) -> int:
        """What the buffers take, and the compiler's room for scores, weights and widened keys of two stacks."""
        heads, wide, item = (
            self.num_kv_heads,
            self.num_planes * self.read_lanes,
            self.dtype.itemsize,
        )
        # Queries and results; float32 sums; greatest score, sums of weights and sinks in registers of their own.
        of_row = wide * ((QUERY_BUFFERS * self.stack + 2) * item + 4) + 3 * LANES * 4
        slots = KV_BUFFERS * self.fetch_kv + 3 * CHUNK_BUFFERS * _chunk(self.pool_dtype)
        total = self.num_stacks * self.rows * of_row
        total += slots * self.width * self.pool_dtype.itemsize
        if self.scale_rows:
            slots = KV_BUFFERS * self.fetch_kv + 3 * CHUNK_BUFFERS * self.block_size
            total += 4 * (slots * max(16, self.scale_rows * heads) + 8 * self.fetch_kv * heads)
        is_one = self.heads_at_once <= math.lcm(self.period, self.stack)
        return total + self._room_of_stack * (1 if is_one else 2)

    @property
    def _room_of_keys(self) -> int:
        """The compiler's for widened keys and values of a head."""
        return 8 * self.tile_kv * self.num_planes * self.read_lanes

    @property
    def _room_of_stack(self) -> int:
        """And for scores and weights."""
        return self.stack * self._room_of_keys + 12 * self.tile_kv * self.rows


def data(pool: Pool) -> jax.Array:
    """The array with the slots, in which a quantised pool is bytes."""
    return pool.data if isinstance(pool, QuantizedPool) else pool


def _chunk(dtype: jnp.dtype) -> int:
    """Slots of a register."""
    return 32 // jnp.dtype(dtype).itemsize


def shape_of(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool: Pool,
    num_kv_heads: int,
    blocks_per_row: int,
    *,
    sizes: TileSizes,
    mask: tuple[float, int | None, float | None] = (1.0, None, None),
    one_query_per_row: bool = False,
) -> Shape:
    """Of the kernel for such arguments. `tile_q`: a power of two up to 128, the same for all programs with prompts."""
    group = q.shape[1] // num_kv_heads
    rows = min(sizes.tile_rows, sizes.head_rows // num_kv_heads)
    tile_q = 1 << (min(128, max(16, rows // group)).bit_length() - 1)
    has_scales = isinstance(pool, QuantizedPool) and pool.scale_zero is not None
    shape = Shape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=q.shape[2],
        block_size=pool.shape[1],
        blocks_per_row=blocks_per_row,
        tile_q=1 if one_query_per_row else tile_q,
        dtype=jnp.dtype(q.dtype),
        pool_dtype=data(pool).dtype,
        format=pool.format if isinstance(pool, QuantizedPool) else None,
        scale_rows=scale_rows(num_kv_heads) if has_scales else 0,
        mask=mask,
        sizes=sizes,
    )
    while shape.tile_q > 1 and shape.vmem_bytes > VMEM_BYTES:
        shape = replace(shape, tile_q=shape.tile_q // 2)
    return shape


def write_sizes(shape: Shape) -> list[int]:
    """Slots that are fetched, merged and put back at once: of the data, and of scales and zeros."""
    sizes = [_chunk(shape.pool_dtype)]
    return [*sizes, shape.block_size] if shape.scale_rows else sizes


def new_rows(shape: Shape, k: jax.Array, v: jax.Array, pool: Pool) -> list[jax.Array]:
    """The new tokens as they stand in the pool, with room before and after: [.., 2*K*D], and [scale_rows*K, ..]."""
    kv = jnp.stack([k, v], axis=2)  # [T, K, 2, D]; of [T, 2*K, D] XLA would keep float32 copies
    if isinstance(pool, QuantizedPool):
        stored = None if pool.scale_zero is None else pool.scale_zero.dtype
        data, scale_zero = quantize(kv, pool.format, stored)
        new = [data.reshape(k.shape[0], -1)]
        if scale_zero is not None:
            of_heads = scale_zero.reshape(k.shape[0], -1, 2)
            new.append(_scales_of_slots(of_heads, shape.scale_rows).T)
    else:
        new = [kv.reshape(k.shape[0], -1)]

    def pad(x, axis, size):
        widths = [(0, 0), (0, 0)]
        widths[axis] = (size, 2 * size - x.shape[axis] % -size)
        return jnp.pad(x, widths)

    return [
        pad(x, axis, size)
        for axis, (x, size) in enumerate(zip(new, write_sizes(shape), strict=True))
    ]


def to_tiles(shape: Shape, q: jax.Array) -> jax.Array:
    """[T, H, D] → [Q, K', P, A, W']: tiles of queries, head by head, in the lanes where the head's keys lie.

    Of a stack of n heads K' = K / n and W' = n W: a row is 0 in the lanes of the stack's other heads.
    """
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    q = jnp.pad(q, ((0, -q.shape[0] % tile_q), (0, 0), (0, 0)))
    q = q.reshape(-1, tile_q, shape.num_kv_heads, group, shape.num_planes, shape.head_lanes)
    q = q.transpose(0, 2, 4, 3, 1, 5).reshape(
        q.shape[0], -1, period, shape.num_planes, group * tile_q, shape.head_lanes
    )

    def place(in_period):
        _, before = shape.lanes(in_period, False)
        after = shape.read_lanes - before - shape.head_lanes
        widths = [(0, 0)] * 4 + [(before, after)]
        return jnp.pad(q[:, :, in_period], widths)

    tiles = jnp.stack([place(in_period) for in_period in range(period)], axis=2)
    planes, stack = shape.num_planes, shape.stack
    tiles = tiles.reshape(-1, shape.num_stacks, stack, planes, group * tile_q, 1, shape.read_lanes)
    tiles = jnp.swapaxes(tiles, 2, 3)
    is_own = jnp.eye(stack, dtype=bool)[:, None, :, None]
    tiles = jnp.where(is_own, tiles, 0).reshape(
        -1, shape.num_stacks, planes, stack * group * tile_q, stack * shape.read_lanes
    )
    rows = (0, shape.rows - tiles.shape[3])
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), rows, (0, 0)))


def from_tiles(shape: Shape, out: jax.Array, num_tokens: int) -> jax.Array:
    """[Q, K', P, A, W] → [T, H, D], from the lanes where the head's values lie."""
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    rows = group * tile_q
    out = out[:, :, :, : shape.stack * rows].reshape(
        -1, shape.num_stacks, shape.num_planes, shape.stack, rows, shape.read_lanes
    )
    out = jnp.swapaxes(out, 2, 3)
    out = out.reshape(out.shape[0], -1, period, shape.num_planes, rows, shape.read_lanes)

    def take(in_period):
        _, first = shape.lanes(in_period, True)
        return out[:, :, in_period, :, :, first : first + shape.head_lanes]

    out = jnp.stack([take(in_period) for in_period in range(period)], axis=2)
    out = out.reshape(-1, shape.num_kv_heads, shape.num_planes, group, tile_q, shape.head_lanes)
    out = out.transpose(0, 4, 1, 3, 2, 5)
    return out.reshape(-1, shape.num_kv_heads * group, shape.head_dim)[:num_tokens]
