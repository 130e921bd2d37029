"""Paged attention for a step: write the new keys and values, then attend. Chooses the implementation."""

from __future__ import annotations

import jax

from jaxpage.batch import StepBatch
from jaxpage.kv_pool import KVPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import xla

# XLA inlines them; as jits of their own they are traced and lowered once for all layers that are alike.
_write_kv = jax.jit(write_kv)
_paged_attention = jax.jit(
    xla.paged_attention, static_argnames=("scale", "window", "soft_cap", "one_query_per_row")
)


class PagedAttention:
    """The attention argument of a model inside a compiled step (`models.attention.Attention`).

    Lives only while the step is traced. `kv_pool` is the list of the pool's arrays, `places` says of each layer which
    KV-cache group and which array are its; a call replaces that array, and the step returns the list when the model
    is done. K and V of all rows are written before any row reads, so a request may hit blocks which another computes
    in the same step.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        batch: StepBatch,
        places: tuple[tuple[int, int], ...],
        *,
        one_query_per_row: bool,
    ):
        self.kv_pool = list(kv_pool)
        self._batch = batch
        self._places = places
        self._one_query_per_row = one_query_per_row

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> jax.Array:
        """q [T, H, D] and k, v [T, K, D] after RoPE → [T, H, D]."""
        batch, (group, array) = self._batch, self._places[layer]
        pool = _write_kv(self.kv_pool[array], k, v, batch.slot_mappings[group])
        self.kv_pool[array] = pool
        return _paged_attention(
            q,
            pool,
            batch.block_tables[group],
            batch.kv_lens,
            batch.query_starts,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            one_query_per_row=self._one_query_per_row,
        )
