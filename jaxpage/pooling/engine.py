"""The engine of pooling models: texts in; a vector per text or per token out. No scheduler.

Texts are computed in one launch, without a KV cache, except long ones of causal models, which are computed in chunks.
Knows how launches are filled, computed and read. Must not know prompts, tasks or activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.models.pooling_model import PoolingModel
from jaxpage.models.token_batch import TokenBatch
from jaxpage.pooling import chunks as chunking
from jaxpage.pooling.chunks import NO_CHUNKS, Chunk, Chunks, ChunkSize
from jaxpage.pooling.rows import Launch, Size, pack
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import Lowering, ProgramRecord, Programs

_MAX_IN_FLIGHT = 2  # launches whose results are not read yet
Results = list[Any]  # one for each text
# Stores the output of a launch in the results; returns how many texts it completed.
Take = Callable[[np.ndarray, Results], int]


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text, as ids."""

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None  # for a pair: 0 or 1 for each token


@dataclass(frozen=True, kw_only=True)
class PoolingStats:
    """What an engine has computed since it was created."""

    num_texts: int
    num_tokens: int
    num_padded_tokens: int  # of all launches, including padding
    num_launches: int


class PoolingEngine:
    """Computes texts in launches of a few sizes, each a compiled program. One thread at a time may call `run`."""

    # `LLM` expects this of an engine; here nothing runs between calls.
    num_unfinished = 0

    def __init__(
        self,
        model: PoolingModel,
        *,
        sizes: Sequence[Size],
        chunks: Chunks = NO_CHUNKS,
        store: ProgramStore | None = None,
        ahead_of_time: bool = True,
        per_token: bool = False,
    ):
        """`per_token`: whether the programs with results for each token are compiled ahead, or those for whole texts.

        Texts longer than all `sizes` are computed with `chunks`.
        """
        self.model = model
        self._sizes, self._chunks = tuple(sizes), chunks
        programs = _lowerings(model, sizes) | chunking.lowerings(model, chunks)
        self._programs = Programs(programs, store)
        self._num_texts = self._num_tokens = self._num_padded = self._num_launches = 0
        if ahead_of_time:
            by_need = [*self._by_need(), *chunks.sizes]
            self._programs.start([size.name(per_token=per_token) for size in by_need])

    def _by_need(self) -> list[Size]:
        """Short lengths first; of equal lengths, the largest launch first."""
        return sorted(self._sizes, key=lambda size: (size.length, -size.num_rows))

    def run(
        self,
        texts: Sequence[Text],
        *,
        per_token: bool = False,
        done: Callable[[int], object] = lambda num_texts: None,
    ) -> list[np.ndarray]:
        """Raw float32 numbers of each text: [D], or [T, D] with `per_token`.

        `done` is called after each launch with the number of texts that it completed.
        """
        results: Results = [None] * len(texts)
        waiting: deque[tuple[jax.Array, Take]] = deque()

        def read() -> None:
            output, take = waiting.popleft()
            done(take(np.asarray(output), results))

        for launched in chain(self._rows(texts, per_token), self._long_texts(texts, per_token)):
            waiting.append(launched)
            if len(waiting) > _MAX_IN_FLIGHT:
                read()
        while waiting:
            read()
        self._num_texts += len(texts)
        self._num_tokens += sum(len(text.token_ids) for text in texts)
        return results

    def _rows(self, texts: Sequence[Text], per_token: bool) -> Iterator[tuple[jax.Array, Take]]:
        """Launch the texts that fit into rows."""
        for launch in pack([len(text.token_ids) for text in texts], self._sizes):
            size = launch.size
            output = self._call(size.name(per_token=per_token), *_fill(launch, texts))
            self._num_padded += size.length * size.num_rows
            yield output, partial(_take_rows, launch, texts, per_token)

    def _long_texts(
        self, texts: Sequence[Text], per_token: bool
    ) -> Iterator[tuple[jax.Array, Take]]:
        """Launch the texts that are too long for rows. Those of one size use the same KV pool one after the other."""
        longest = max(size.length for size in self._sizes)
        long = [i for i, text in enumerate(texts) if len(text.token_ids) > longest]
        for size in self._chunks.sizes:
            own = [i for i in long if self._chunks.size_of(len(texts[i].token_ids)) == size]
            yield from self._of_size(size, own, texts, per_token)

    def _of_size(
        self, size: ChunkSize, indices: list[int], texts: Sequence[Text], per_token: bool
    ) -> Iterator[tuple[jax.Array, Take]]:
        kv_pool = self._chunks.pool_of(size).allocate() if indices else []
        for index in indices:
            token_ids = texts[index].token_ids
            pooled = jnp.zeros(self.model.config.hidden_size)
            for chunk in chunking.cut(len(token_ids), size):
                packed = chunking.pack_chunk(chunk, size, token_ids)
                name = size.name(per_token=per_token)
                kv_pool, pooled, output = self._call(name, kv_pool, pooled, packed)
                self._num_padded += size.num_tokens
                yield output, partial(_take_chunk, index, chunk, per_token)

    def _call(self, name: str, *arguments: Any) -> Any:
        program = self._programs[name]
        self._programs.num_calls[name] += 1
        self._num_launches += 1
        return program(jax.tree.leaves(nnx.state(self.model)), *arguments)

    def stats(self) -> PoolingStats:
        return PoolingStats(
            num_texts=self._num_texts,
            num_tokens=self._num_tokens,
            num_padded_tokens=self._num_padded,
            num_launches=self._num_launches,
        )

    def programs(self) -> list[ProgramRecord]:
        """The compiled programs, and the names of those that are not compiled yet."""
        return self._programs.records()

    def wait_until_warm(self) -> None:
        """Wait until every program that is compiled ahead is ready. Raises what the compiler raised."""
        self._programs.wait()

    def has_unfinished_requests(self) -> bool:
        return False

    def with_schedulers(self, *_: Any) -> Any:
        """Raises ValueError: there is no KV pool."""
        raise ValueError("a pooling model has no KV pool")

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """No effect: there is no prefix cache."""
        return True

    def save_prefix_cache(self) -> None:
        """No effect: there is no prefix cache."""


def _lowerings(model: PoolingModel, sizes: Iterable[Size]) -> dict[str, Lowering]:
    """Each program traced from shapes: `(leaves, tokens, spans) -> float32`, see `_fill`."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def compute(per_token: bool, leaves: list[Any], tokens: jax.Array, spans: jax.Array):
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        token_ids, positions, segments, type_ids = tokens
        batch = TokenBatch(
            token_ids=token_ids, positions=positions, segments=segments, type_ids=type_ids
        )
        if per_token:
            return merged.of_tokens(batch)
        return merged.of_texts(batch, spans[0], spans[1])

    def lower(size: Size, per_token: bool) -> jax.stages.Lowered:
        tokens = jax.ShapeDtypeStruct((4, size.num_rows, size.length), jnp.int32)
        spans = jax.ShapeDtypeStruct((2, size.num_texts), jnp.int32)
        return jax.jit(partial(compute, per_token), keep_unused=True).lower(structs, tokens, spans)

    return {
        size.name(per_token=per_token): partial(lower, size, per_token)
        for per_token in (False, True)
        for size in sizes
    }


def _fill(launch: Launch, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
    """int32[4, B, L]: ids, positions, segments and types; int32[2, S]: first token and length of each text."""
    size = launch.size
    tokens = np.zeros((4, size.num_rows, size.length), np.int32)
    spans = np.zeros((2, size.num_texts), np.int32)
    for number, place in enumerate(launch.places):
        text = texts[place.text]
        length = len(text.token_ids)
        where = tokens[:, place.row, place.start : place.start + length]
        where[0] = text.token_ids
        where[1] = np.arange(length)
        where[2] = number + 1
        if text.type_ids is not None:
            where[3] = text.type_ids
        spans[:, number] = place.row * size.length + place.start, length
    return tokens, spans


def _take_rows(
    launch: Launch, texts: Sequence[Text], per_token: bool, output: np.ndarray, results: Results
) -> int:
    for number, place in enumerate(launch.places):
        if not per_token:
            results[place.text] = output[number]
        else:
            stop = place.start + len(texts[place.text].token_ids)
            results[place.text] = output[place.row, place.start : stop].copy()
    return len(launch.places)


def _take_chunk(
    index: int, chunk: Chunk, per_token: bool, output: np.ndarray, results: Results
) -> int:
    if not per_token:
        results[index] = output
    else:
        if chunk.start == 0:
            results[index] = np.empty((chunk.length, output.shape[-1]), np.float32)
        results[index][chunk.start : chunk.stop] = output[: chunk.stop - chunk.start]
    return int(chunk.is_last)
