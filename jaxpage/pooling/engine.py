"""The engine of pooling models: texts in, a vector or one for each token out. No KV cache and no scheduler.

Knows how launches are filled, computed and read. Must not know prompts, tasks or activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.models.pooling_model import PoolingModel
from jaxpage.models.token_batch import TokenBatch
from jaxpage.pooling.rows import Launch, Size, pack
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import Lowering, ProgramRecord, Programs

_IN_FLIGHT = 2  # launches whose results are not read yet


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text, as ids."""

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None  # of a pair: 0 or 1 for each token


@dataclass(frozen=True, kw_only=True)
class PoolingStats:
    """What an engine has computed since it was made."""

    num_texts: int
    num_tokens: int
    num_padded_tokens: int  # of launches, padding included
    num_launches: int


class PoolingEngine:
    """Computes texts in launches of few sizes, each a compiled program. One thread at a time may call `run`."""

    # What `LLM` asks of engines that generate; here nothing runs between calls.
    num_unfinished = 0

    def __init__(
        self,
        model: PoolingModel,
        *,
        sizes: Sequence[Size],
        store: ProgramStore | None = None,
        ahead_of_time: bool = True,
        of_tokens: bool = False,
    ):
        """`of_tokens`: whether the model is mostly asked for each token, so that those programs are compiled ahead."""
        self.model = model
        self._sizes = tuple(sizes)
        self._programs = Programs(_lowerings(model, sizes), store)
        self._num_texts = self._num_tokens = self._num_padded = self._num_launches = 0
        if ahead_of_time:
            self._programs.start([_name(size, of_tokens=of_tokens) for size in self._by_need()])

    def _by_need(self) -> list[Size]:
        """Short texts first: one alone, then many."""
        return sorted(self._sizes, key=lambda size: (size.length, -size.num_rows))

    def run(
        self,
        texts: Sequence[Text],
        *,
        of_tokens: bool = False,
        done: Callable[[int], object] = lambda num_texts: None,
    ) -> list[np.ndarray]:
        """Raw float32 numbers of each text: [D], or `of_tokens` [T, D]. `done` hears of each launch that was read."""
        results: list[Any] = [None] * len(texts)
        waiting: deque[tuple[Launch, jax.Array]] = deque()

        def read() -> None:
            launch, output = waiting.popleft()
            for index, found in _read(launch, np.asarray(output), texts, of_tokens):
                results[index] = found
            done(len(launch.places))

        for launch in pack([len(text.token_ids) for text in texts], self._sizes):
            name = _name(launch.size, of_tokens=of_tokens)
            tokens, spans = _fill(launch, texts)
            program = self._programs[name]
            self._programs.num_calls[name] += 1
            leaves = jax.tree.leaves(nnx.state(self.model))
            waiting.append((launch, program(leaves, tokens, spans)))
            self._count(launch, texts)
            if len(waiting) > _IN_FLIGHT:
                read()
        while waiting:
            read()
        return results

    def _count(self, launch: Launch, texts: Sequence[Text]) -> None:
        self._num_launches += 1
        self._num_texts += len(launch.places)
        self._num_tokens += sum(len(texts[place.text].token_ids) for place in launch.places)
        self._num_padded += launch.size.length * launch.size.num_rows

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
        """Until every program that was started is compiled. Raises what the compiler raised."""
        self._programs.wait()

    def has_unfinished_requests(self) -> bool:
        return False

    def look(self, *_: Any) -> Any:
        """Raises ValueError: there is no KV pool to look at."""
        raise ValueError("a pooling model has no KV pool")

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """There is none."""
        return True

    def save_prefix_cache(self) -> None:
        """There is none."""


def _name(size: Size, *, of_tokens: bool) -> str:
    return f"{'tokens' if of_tokens else 'texts'} B={size.num_rows} L={size.length}"


def _lowerings(model: PoolingModel, sizes: Iterable[Size]) -> dict[str, Lowering]:
    """Each program traced from shapes: `(leaves, tokens, spans) -> float32`, see `_fill`."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def compute(of_tokens: bool, leaves: list[Any], tokens: jax.Array, spans: jax.Array):
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        token_ids, positions, segments, type_ids = tokens
        batch = TokenBatch(
            token_ids=token_ids, positions=positions, segments=segments, type_ids=type_ids
        )
        if of_tokens:
            return merged.of_tokens(batch)
        return merged.of_texts(batch, spans[0], spans[1])

    def lower(size: Size, of_tokens: bool) -> jax.stages.Lowered:
        tokens = jax.ShapeDtypeStruct((4, size.num_rows, size.length), jnp.int32)
        spans = jax.ShapeDtypeStruct((2, size.num_texts), jnp.int32)
        return jax.jit(partial(compute, of_tokens), keep_unused=True).lower(structs, tokens, spans)

    return {
        _name(size, of_tokens=of_tokens): partial(lower, size, of_tokens)
        for of_tokens in (False, True)
        for size in sizes
    }


def _fill(launch: Launch, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
    """int32[4, B, L]: ids, positions, segments and types; int32[2, S]: the first token of each text, and how many."""
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


def _read(
    launch: Launch, output: np.ndarray, texts: Sequence[Text], of_tokens: bool
) -> Iterable[tuple[int, np.ndarray]]:
    for number, place in enumerate(launch.places):
        if not of_tokens:
            yield place.text, output[number]
        else:
            stop = place.start + len(texts[place.text].token_ids)
            yield place.text, output[place.row, place.start : stop].copy()
