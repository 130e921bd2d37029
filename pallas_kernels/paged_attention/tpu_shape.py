"""What the TPU kernel is specialised for: sizes, how a head lies in lanes, and how far heads and tiles are unrolled.

Letters as in `tpu.py`, the layout as in `tpu_layout.py`. The one place that decides what is unrolled. Knows no arrays
but by shape and dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.paged_attention.tpu_fp8 import BIASED, UNIT_OF_BIASED

Pool = Shaped[Array, "N S 2*K*D"] | QuantizedPool  # see `tpu_layout.to_tpu`

VMEM_BYTES = 32 << 20  # of 64 MB and more
QUERY_BUFFERS = 2
CHUNK_BUFFERS = 8
UNROLLED_REGISTERS = 32  # of 64
UNROLLED_HEADS = 5
UNROLLED_SCORES = 128  # registers of a head, times its planes
UNROLLED_BYTES = 4 << 20  # of widened keys and values, scores and weights
UNROLLED_BLOCKS = 16  # of a fetch
FETCH_BYTES = 1 << 20  # about, as far as MOST_TILES are enough
MOST_TILES = 4  # of a fetch


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may differ from one kind of device to another (`tune.py`), but not within an engine: `tile_kv` and
    `tile_bytes` say where the sums of a row are cut. Fewer are taken where VMEM would not hold so many.

    tile_rows: most rows in a tile of queries (A). In bfloat16 that is also the flops for each byte of KV that is read:
    by the data sheets a v5e needs 240 to be bound by its MXUs and not by memory, a TPU7x 310, a v6e 560. head_rows:
    most K * A. tile_kv, tile_bytes: most keys in a tile (B), and most bytes.
    """

    tile_rows: int = 256
    head_rows: int = 4096
    tile_kv: int = 512
    tile_bytes: int = 4 << 20


def scale_rows(num_kv_heads: int) -> int:
    """Rows of `scale_zero` for each of the KV heads of a device: 4, or twice as many to fill registers of 8 rows.

    Of 12 rows, say, XLA would lay out an array in another order, so that nothing is padded, and turn it for each layer.
    """
    return 8 if num_kv_heads > 1 and num_kv_heads % 2 else 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel is specialised for."""

    num_kv_heads: int  # of latents: shares of the query heads, see `value_dim`
    group: int  # query heads of each
    head_dim: int
    block_size: int
    blocks_per_row: int
    tile_q: int
    dtype: jnp.dtype  # of q and of the result
    pool_dtype: jnp.dtype
    format: str | None  # of the pool, see `tpu_fp8.format_of`
    scale_rows: int  # of a KV head in scale_zero; 0 if there is none
    mask: tuple[float, int | None, float | None]  # scale, window, soft_cap
    sizes: TileSizes
    # Of the layer in a slot that other layers share; None: the slot is its own.
    first_lane: int | None = None
    # Of a pool of latents: a slot is one key, whose first elements are the value, so there is one KV head. The query
    # heads are divided into `num_kv_heads` shares, each computed as if it had a KV head of its own.
    value_dim: int | None = None
    # Whether a row has one tile, whose last queries are its own. A tile is ordered by token and then by head, and not
    # the other way round, so that XLA moves less to make it.
    one_tile_per_row: bool = False

    @property
    def is_of_latents(self) -> bool:
        return self.value_dim is not None

    @property
    def unit(self) -> float:
        """Of the numbers that the MXU reads, see `tpu_fp8.py`."""
        return UNIT_OF_BIASED if self.format == BIASED else 1.0

    @property
    def comes_by_head(self) -> bool:
        """Whether queries come as [H, T, W], since XLA multiplies them with a matrix of each head. Results go flat."""
        return self.is_of_latents and self.tile_q > 1 and not self.one_tile_per_row

    @property
    def query_parts(self) -> tuple[tuple[int, int], ...]:
        """The lanes [first, end) of each array that queries come in. What is multiplied with latents and what is
        rotated come apart: XLA would copy both to put them side by side.
        """
        width, values = self.read_lanes, self.value_dim or 0
        if self.is_of_latents and values % LANES == 0 and values < width:
            return (0, values), (values, width)
        return ((0, width),)

    @property
    def num_planes(self) -> int:
        return 2 if self.format == "int4" else 1

    @property
    def head_lanes(self) -> int:
        """Lanes that hold a head's K, or its V."""
        return self.head_dim // self.num_planes

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def tile_tokens(self) -> int:
        """Tokens whose queries come, and whose results go, at once: with one query per row those of a register, if
        all heads together are whole registers.
        """
        is_one = self.tile_q == 1 and self._is_whole
        return slots_of_register(self.dtype) if is_one else self.tile_q

    @property
    def is_flat(self) -> bool:
        """Whether queries come, and results go, as [T, H * D]: a tile of a head is whole registers of it, or heads are
        spread in VMEM.

        Else XLA brings them into tiles before, and back after: 120 k cycles on a v6e for 2,048 tokens of 16 heads.
        """
        is_whole = self._is_tall and self.head_lanes % LANES == 0
        return not self.is_of_latents and (self.spreads_heads or is_whole)

    @property
    def spreads_heads(self) -> bool:
        """Whether a tile of all heads comes at once, and each head is given registers of its own (`tpu_spread.py`)."""
        is_spread = self.head_lanes % LANES > 0 and self._is_whole
        return self.picks_rows or (self._is_tall and is_spread)

    @property
    def picks_rows(self) -> bool:
        """Whether a row's queries are picked out of a tile of tokens."""
        return self.tile_q < self.tile_tokens

    @property
    def _is_tall(self) -> bool:
        """Whether the queries of a head in a tile are whole registers of rows."""
        is_by_head = not self.one_tile_per_row
        return is_by_head and self.tile_q % slots_of_register(self.dtype) == 0

    @property
    def _is_whole(self) -> bool:
        """Whether all heads side by side fill registers. Those that one latent is the key of do not come so."""
        return not self.is_of_latents and self.num_heads * self.head_dim % LANES == 0

    @property
    def kv_lanes(self) -> int:
        """Lanes of a head's K and V in a slot."""
        return (1 if self.is_of_latents else 2) * self.head_lanes

    @property
    def width(self) -> int:
        """Lanes of a slot."""
        return (1 if self.is_of_latents else self.num_kv_heads) * self.kv_lanes

    @property
    def own_lanes(self) -> tuple[slice, ...]:
        """Index of the layer's lanes in a block [S, lanes]; none if all are."""
        if self.first_lane is None:
            return ()
        return slice(None), slice(self.first_lane, self.first_lane + self.width)

    @property
    def period(self) -> int:
        """After this many heads lanes begin at the start of a register again."""
        return LANES // math.gcd(self.kv_lanes, LANES)

    @property
    def period_lanes(self) -> int:
        """Lanes from those heads to the next; 0 if all have one key."""
        return 0 if self.is_of_latents else self.period * self.kv_lanes

    @property
    def read_lanes(self) -> int:
        """W: whole registers, as many as any head's K or V lies in."""
        starts = range(0, self.period * self.kv_lanes, self.head_lanes)
        widest = max(start % LANES + self.head_lanes for start in starts)
        return -(-widest // LANES) * LANES

    @property
    def value_lanes(self) -> int:
        """W of values: fewer than of keys, of latents."""
        return self.read_lanes if self.value_dim is None else -(-self.value_dim // LANES) * LANES

    def lanes(self, head: int, value: bool) -> tuple[int, int]:
        """The first of the W lanes around a head's K or V, counted from its period; and where it begins among them."""
        of_value = self.head_lanes if value and not self.is_of_latents else 0
        start = head % self.period * self.kv_lanes + of_value
        last = self.period * self.kv_lanes - self.read_lanes
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
    def picked_shape(self) -> tuple[int, int, int]:
        """The shape of a tile that rows are picked out of: all its heads, and those that the last stack reaches to."""
        heads = (self.num_stacks - 1) * self.stack * self.group + self.rows
        return self.num_planes * self.read_lanes // LANES, heads * self.tile_tokens, LANES

    @property
    def heads_at_once(self) -> int:
        """KV heads that are unrolled, so that the arithmetic of one fills the waits of another; a divisor of K.

        With one query per row as many as have scores that registers hold. Else a few, whose scores are in VMEM in any
        case: with 4 a head takes 435 cycles on a v6e, with 2 517, alone 690. The rest is a loop, also for the
        compiler's sake: unrolled heads of int4, each in two planes, take it minutes.
        """
        least = math.lcm(self.period, self.stack)
        of_stack = self.rows // 8 * (self.fetch_kv // LANES)
        most = UNROLLED_REGISTERS // of_stack * self.stack
        if self.tile_q > 1:
            most = UNROLLED_HEADS if of_stack * self.num_planes <= UNROLLED_SCORES else 1
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
        # The nearest power of two, since fetches are counted by shifts.
        return min(MOST_TILES, 1 << max(0, round(math.log2(FETCH_BYTES / of_tile))))

    @property
    def fetch_kv(self) -> int:
        return self.tiles_of_fetch * self.tile_kv

    @property
    def kv_buffers(self) -> int:
        """Fetches of keys in VMEM: with one or a few queries per row two are on their way while one is computed.

        Short rows wait for memory's latency, and tiles of many queries are computed for longer than they come.
        """
        return 3 if self.tile_q == 1 or self.one_tile_per_row else 2

    @property
    def vmem_bytes(self) -> int:
        """What the buffers take, and the compiler's room for scores, weights and widened keys of two stacks."""
        heads, wide, item = (
            self.num_kv_heads,
            self.num_planes * self.read_lanes,
            self.dtype.itemsize,
        )
        wide_values = self.num_planes * self.value_lanes
        # Queries and results; float32 sums; greatest score, sums of weights and sinks in registers of their own.
        lanes = QUERY_BUFFERS * wide + 2 * wide_values
        if self.spreads_heads and not self.picks_rows:
            lanes = (QUERY_BUFFERS + 2) * self.head_dim + 2 * wide
        of_row = lanes * item + 4 * wide_values + 3 * LANES * 4
        sizes = [CHUNK_BUFFERS * (size + write_window(self, size)) for size in write_sizes(self)]
        slots = self.kv_buffers * self.fetch_kv + sizes[0]
        total = self.num_stacks * self.rows * of_row
        if self.picks_rows:
            of_tile = math.prod(self.picked_shape)
            total += (2 * 4 + (QUERY_BUFFERS + 2) * item) * of_tile
        total += slots * self.width * self.pool_dtype.itemsize
        if self.scale_rows:
            slots = self.kv_buffers * self.fetch_kv + sizes[1]
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


def slots_of_register(dtype: jnp.dtype) -> int:
    return 32 // jnp.dtype(dtype).itemsize


def write_sizes(shape: Shape) -> list[int]:
    """Slots that are fetched, merged and put back at once: of the data, and of scales and zeros.

    In HBM a tile has 8 slots of any dtype, in VMEM as many as a register.
    """
    sizes = [8 if shape.tile_q == 1 else slots_of_register(shape.pool_dtype)]
    return [*sizes, shape.block_size] if shape.scale_rows else sizes


def write_window(shape: Shape, size: int) -> int:
    """New tokens that are fetched for `size` slots: several may lie across the borders of registers, one does not."""
    return size if shape.tile_q == 1 else 2 * size
