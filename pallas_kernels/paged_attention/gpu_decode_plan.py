"""What a program of `gpu_decode.py` works with: what is known before it runs, its shared memory, its items.

Knows sizes and barriers; must not know what is computed. Letters as in `gpu.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.paged_attention import gpu_layout
from pallas_kernels.paged_attention.gpu_tiles import Options, Source, Stages
from pallas_kernels.wgmma import swizzle_of, tiled

TILE = 64  # keys: the rows of one wgmma
MOST_STAGES = 8
MOST_BESIDE = 8192  # sums that a program's registers have room for twice


def pieces(head_dim: int) -> list[tuple[int, int]]:
    """V' is the left operand of wgmma, whose rows are multiples of 64: of 96 columns the first and the last 64."""
    return [(0, head_dim)] if head_dim % 64 == 0 else [(0, 64), (head_dim - 64, 64)]


def part_shape(group: int, value_dim: int) -> tuple[int, int]:
    """The shape of a part's sum, O': D, and G as wgmma pads it."""
    return sum(width for _, width in pieces(value_dim)), pl.cdiv(group, 8) * 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known before a program runs."""

    options: Options
    source: Source
    num_kv_heads: int
    head_dim: int
    value_dim: int  # D, or of latents fewer
    columns: int  # G as wgmma pads it
    in_groups: bool  # whether items may be groups of parts
    num_stages: int
    num_programs: int

    @property
    def adds_in_place(self) -> bool:
        """wgmma adds to the sums of D x G, because registers have no room for their increase beside them."""
        return self.source.is_of_latents or self.value_dim * self.columns > MOST_BESIDE

    @classmethod
    def of(
        cls,
        q,
        source: Source,
        num_kv_heads: int,
        options: Options,
        division: gpu_layout.Division,
        max_items: int,
    ) -> Plan:
        """`max_items`: the most items that all rows together can have, for each KV head."""
        head_dim, max_pairs = q.shape[2], max_items * num_kv_heads
        value_dim = source.value_dim or head_dim
        _, columns = part_shape(q.shape[1] // num_kv_heads, value_dim)
        per_sm, num_stages = _programs_and_stages(source, columns, q, options, max_pairs)
        return cls(
            options=options,
            source=source,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            columns=columns,
            in_groups=division.parts > 1,
            num_stages=num_stages,
            num_programs=min(per_sm * hopper.num_sms(), max_pairs),
        )


def _programs_and_stages(
    source: Source, columns: int, q, options: Options, num_pairs: int
) -> tuple[int, int]:
    """Programs that share an SM, as many as are asked for and fit with two stages; and stages of each, K and V.

    Where items are few, they wait for their copies rather than for each other: fewer programs have more stages.
    """
    itemsize, head_dim = q.dtype.itemsize, q.shape[2]
    stage_bytes = (1 if source.is_of_latents else 2) * TILE * source.bytes_per_key()
    own_bytes = columns * (2 * head_dim + TILE) * itemsize + 4096  # two q, p, barriers, reductions
    if source.format is not None:
        own_bytes += TILE * head_dim * itemsize
    fitting = gpu_layout.SM_BYTES // (2 * stage_bytes + own_bytes + gpu_layout.RESERVED_BYTES)
    if source.has_scales:  # scales and zeros: more registers than a third of an SM's
        fitting = min(fitting, 2)
    wanted = min(options.sizes.programs_per_sm, pl.cdiv(num_pairs, hopper.num_sms()))
    per_sm = max(1, min(wanted, fitting))
    share = gpu_layout.SM_BYTES // per_sm - gpu_layout.RESERVED_BYTES
    return per_sm, min((share - own_bytes) // stage_bytes, MOST_STAGES)


class Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs. Arrays are in wgmma's layout."""

    queries: Any  # [2, columns, D]
    weights: Any  # [columns, TILE], in q's dtype
    wide: Any  # [TILE, D]: a tile of K or V, widened; None if the pool is not quantised
    queries_ready: Any
    keys: Stages
    values: Stages | None  # None of latents: those of keys


def memory_of(plan: Plan, dtype) -> Memory:
    """The types of a program's shared memory."""
    as_wgmma = partial(tiled, dtype=dtype, swizzle=swizzle_of(plan.head_dim * dtype.itemsize))
    return Memory(
        queries=as_wgmma(2, plan.columns, plan.head_dim),
        weights=as_wgmma(plan.columns, TILE),
        wide=None if plan.source.format is None else as_wgmma(TILE, plan.head_dim),
        queries_ready=plgpu.Barrier(num_barriers=2),
        keys=plan.source.stages(plan.num_stages, TILE),
        values=None if plan.source.is_of_latents else plan.source.stages(plan.num_stages, TILE),
    )


class Item(NamedTuple):
    """An item of `gpu_layout.Items` for one KV head: int32 each."""

    row: Any
    head: Any
    low: Any  # positions of the keys that the query sees, from here
    high: Any  # to before here
    keys: Any  # of a part

    @classmethod
    def of(cls, plan: Plan, items: gpu_layout.Items, pair, is_there) -> Item:
        """`pair`: item * num_kv_heads + head. An item without keys unless it `is_there`."""
        pair = jnp.where(is_there, pair, 0)
        num_kv_heads = jnp.int32(plan.num_kv_heads)
        item, head = lax.div(pair, num_kv_heads), lax.rem(pair, num_kv_heads)
        low = items.low[item]
        high = jnp.where(is_there, items.high[item], low)
        return cls(items.row[item], head, low, high, items.keys[item])

    @property
    def first(self):
        """Position where the first tile begins."""
        return lax.div(self.low, jnp.int32(TILE)) * TILE

    @property
    def num_tiles(self):
        num_tiles = lax.div(self.high - self.first + (TILE - 1), jnp.int32(TILE))
        return jnp.where(self.low < self.high, num_tiles, 0)

    @property
    def parts(self) -> tuple:
        """The numbers of its parts in the row, from the first to before the second."""
        return lax.div(self.low, self.keys), lax.div(self.high + self.keys - 1, self.keys)

    def tiles_to(self, part):
        """The number of its tiles to the end of a part."""
        return jnp.minimum(
            self.num_tiles, lax.div((part + 1) * self.keys - self.first, jnp.int32(TILE))
        )
