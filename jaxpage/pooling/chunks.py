"""Texts that are longer than a launch: computed chunk by chunk, with the KV of the preceding tokens.

For causal models, whose tokens see no later ones. Knows the programs of chunks. Must not know rows, prompts or tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.batch import StepBatch
from jaxpage.device import Device
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPool, KVPoolSpec
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.pooling_model import PoolingModel
from jaxpage.ops import attention
from jaxpage.ops.attention import PagedAttention
from jaxpage.ops.rope import Rotate
from jaxpage.plan import NULL_BLOCK
from jaxpage.pool_choice import heads_of_layers, heads_of_pool, layout_of
from jaxpage.runner.programs import Lowering


@dataclass(frozen=True, order=True)
class ChunkSize:
    """Launches of up to C tokens, for texts of up to L tokens."""

    longest: int
    num_tokens: int

    def name(self, *, per_token: bool) -> str:
        kind = "tokens" if per_token else "texts"
        return f"{kind} C={self.num_tokens} L={self.longest}"


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of a text of `length`."""

    start: int
    stop: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.length


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The available sizes, and the KV pool of one text. No sizes: every text is computed in one launch."""

    sizes: tuple[ChunkSize, ...] = ()
    pool: KVPoolSpec | None = None  # without the number of its blocks, which `pool_of` sets

    def size_of(self, length: int) -> ChunkSize:
        """The smallest size that holds a text of this length."""
        return next(size for size in self.sizes if size.longest >= length)

    def pool_of(self, size: ChunkSize) -> KVPoolSpec:
        assert self.pool is not None
        return replace(self.pool, num_blocks=1 + -(-size.longest // self.pool.block_size))


NO_CHUNKS = Chunks()


def make_chunks(
    model: PoolingModel, device: Device, *, num_tokens: int, max_len: int, block_size: int
) -> Chunks:
    """Chunks of `num_tokens`, for texts of `num_tokens` + 1 to `max_len` tokens. The KV pools double in length."""
    if max_len <= num_tokens:
        return NO_CHUNKS
    lengths = [min(2 * num_tokens, max_len)]
    while lengths[-1] < max_len:
        lengths.append(min(2 * lengths[-1], max_len))
    decoder = model.decoder_states.decoder.config
    heads = heads_of_pool(decoder, 1)
    pool = KVPoolSpec(
        num_arrays=len(decoder.kv_layers),
        num_blocks=0,
        block_size=block_size,
        num_kv_heads=heads.num,
        head_dim=heads.head_dim,
        value_dim=decoder.value_dim,
        dtype=jnp.dtype(decoder.dtype),
        platform=device.platform,
        layout=layout_of(decoder, device),
    )
    table = (1, -(-max_len // block_size))
    kinds = heads_of_layers(decoder, 1)
    pool = attention.choose(pool, device, heads=kinds, table=table).chosen
    return Chunks(sizes=tuple(ChunkSize(length, num_tokens) for length in lengths), pool=pool)


def cut(length: int, size: ChunkSize) -> Iterator[Chunk]:
    """The chunks of a text, in order."""
    for start in range(0, length, size.num_tokens):
        yield Chunk(start, min(start + size.num_tokens, length), length)


def pack_chunk(chunk: Chunk, size: ChunkSize, token_ids: Sequence[int]) -> np.ndarray:
    """int32[3 + C]: start, stop and length, then the chunk's ids. `token_ids` are those of the whole text."""
    packed = np.zeros(3 + size.num_tokens, np.int32)
    packed[:3] = chunk.start, chunk.stop, chunk.length
    packed[3 : 3 + chunk.stop - chunk.start] = token_ids[chunk.start : chunk.stop]
    return packed


def lowerings(model: PoolingModel, chunks: Chunks) -> dict[str, Lowering]:
    """Each program traced from shapes: `(leaves, kv_pool, pooled, packed) -> (kv_pool, pooled, float32)`.

    `pooled`, float32[E], is carried from chunk to chunk, and zeros before the first. The last result is raw numbers:
    [D] for the text, valid after its last chunk, or [C, D] for the chunk's tokens. Pool and `pooled` are donated.
    """
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def compute(
        spec: KVPoolSpec,
        per_token: bool,
        leaves: list[Any],
        kv_pool: KVPool,
        pooled: jax.Array,
        packed: jax.Array,
    ) -> tuple[KVPool, jax.Array, jax.Array]:
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        chunk, kv = _inputs(spec, kv_pool, packed)
        states = merged.states_of_chunk(chunk)
        pooled = pooled + merged.share_of_chunk(states, chunk, length=packed[2])
        found = merged.finished(states if per_token else pooled)
        return kv.kv_pool, pooled, found

    def lower(size: ChunkSize, per_token: bool) -> jax.stages.Lowered:
        spec = chunks.pool_of(size)
        pooled = jax.ShapeDtypeStruct((model.config.hidden_size,), jnp.float32)
        packed = jax.ShapeDtypeStruct((3 + size.num_tokens,), jnp.int32)
        program = jax.jit(
            partial(compute, spec, per_token), donate_argnums=(1, 2), keep_unused=True
        )
        return program.lower(structs, spec.abstract(), pooled, packed)

    return {
        size.name(per_token=per_token): partial(lower, size, per_token)
        for per_token in (False, True)
        for size in chunks.sizes
    }


def _inputs(
    spec: KVPoolSpec, kv_pool: KVPool, packed: jax.Array
) -> tuple[ForwardInput, PagedAttention]:
    """The decoder's input, and its attention, which afterwards has the pool with the chunk's KV.

    The text's KV is in blocks 1, 2, ...; KV that a longer text has left after it is never read.
    """
    start, stop, token_ids = packed[0], packed[1], packed[3:]
    positions = start + jnp.arange(token_ids.size, dtype=jnp.int32)
    is_token = positions < stop
    batch = StepBatch(
        slots=jnp.zeros(1, jnp.int32),
        query_starts=jnp.stack([jnp.zeros_like(start), stop - start]),
        kv_lens=stop[None],
        token_ids=token_ids,
        positions=jnp.where(is_token, positions, 0),
        slot_mappings=jnp.where(is_token, spec.block_size + positions, NULL_BLOCK)[None],
        block_tables=jnp.arange(1, spec.num_blocks, dtype=jnp.int32)[None, None],
        is_token=is_token,
    )
    places = tuple(Location(0, index) for index in range(spec.num_arrays))
    paged = PagedAttention(kv_pool, batch, places, spec=spec, one_query_per_row=False)
    inputs = ForwardInput(
        token_ids=token_ids,
        positions=batch.positions,
        attention=paged,
        is_token=is_token,
        rotate=Rotate(in_step=True),
    )
    return inputs, paged
