"""`Rollout`: what a sampler returns, as padded arrays; and the layouts that trainers expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpage.outputs import CompletionOutput, RequestOutput

Array = Any  # NumPy's, or jax's after `Rollout.device_put`
Span = tuple[int, int, int]  # (weight version, first token, token after the last)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """N = prompts * n completions, where the n of a prompt are adjacent. C, P: the longest completion and prompt.

    Padding is determined by `lengths`, never by an id, so the pad id may be sampled.
    """

    token_ids: Array  # int32[N, C], the stop token included, padded on the right
    logprobs: Array  # float32[N, C] of these tokens, as `logprobs_mode` says; 0 where padded
    # bool[N, C]: True for sampled tokens; False for padding, and for the environment's tokens in a `Session`
    mask: Array
    lengths: Array  # int32[N], of completions
    prompt_ids: Array  # int32[N, P], padded on the left
    prompt_lengths: Array  # int32[N]
    prompt_indices: Array  # int32[N]: index of the row's prompt in the call
    num_cached: Array  # int32[N]: prompt tokens found in the prefix cache
    seeds: Array  # int64[N]: the request's, modulo 2**32; -1 if the engine chose it
    finish_reasons: tuple[str, ...]  # "stop", "length", "abort", "repetition"
    weight_versions: tuple[tuple[Span, ...], ...]  # which tokens were sampled with which weights
    texts: tuple[str, ...]  # "" without a tokenizer
    pad_id: int
    temperature: float  # 0: greedy
    # "temperature": of logits / temperature over the whole vocabulary; or "raw", "processed"
    logprobs_mode: str

    def __len__(self) -> int:
        return len(self.finish_reasons)

    def prompt(self, row: int) -> list[int]:
        """The prompt of a row, without padding."""
        width = self.prompt_ids.shape[1]
        return np.asarray(self.prompt_ids[row, width - int(self.prompt_lengths[row]) :]).tolist()

    def completion(self, row: int) -> list[int]:
        """The completion of a row, without padding."""
        return np.asarray(self.token_ids[row, : int(self.lengths[row])]).tolist()

    def device_put(self, sharding: Sharding | None = None) -> Rollout:
        """The same with jax arrays, placed by `sharding` or on jax's default device."""
        arrays = {
            f.name: jax.device_put(getattr(self, f.name), sharding)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), np.ndarray) and f.name != "seeds"
        }
        return dataclasses.replace(self, **arrays)

    def to_padded(
        self,
        prompt_length: int | None = None,
        completion_length: int | None = None,
        *,
        pad_id: int | None = None,
        side: str = "left",
    ) -> Padded:
        """Prompts and completions in one array of L = `prompt_length` + `completion_length` columns.

        Lengths default to the longest; give them for the same shape in every step. `side`: where prompts are padded.
        "left": all completions begin in column `prompt_length`; "right": each follows its prompt directly, and all
        padding is at the end. Raises ValueError for a length that is too short.
        """
        if side not in ("left", "right"):
            raise ValueError(f'side must be "left" or "right", got {side!r}')
        prompt_lengths, lengths = np.asarray(self.prompt_lengths), np.asarray(self.lengths)
        width = _width("prompt_length", prompt_length, prompt_lengths)
        total = width + _width("completion_length", completion_length, lengths)
        column = np.arange(total)[None]
        first = (width - prompt_lengths)[:, None] if side == "left" else 0
        begin = first + prompt_lengths[:, None]  # of the completion
        in_prompt = (column >= first) & (column < begin)
        in_completion = (column >= begin) & (column < begin + lengths[:, None])
        prompts, completions = np.asarray(self.prompt_ids), np.asarray(self.token_ids)
        is_prompt = np.arange(prompts.shape[1]) >= prompts.shape[1] - prompt_lengths[:, None]
        is_token = np.arange(completions.shape[1]) < lengths[:, None]
        ids = np.full((len(self), total), self.pad_id if pad_id is None else pad_id, np.int32)
        logprobs, sampled = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, bool)
        # Both sides of each assignment list the tokens row by row.
        ids[in_prompt] = prompts[is_prompt]
        ids[in_completion] = completions[is_token]
        logprobs[in_completion] = np.asarray(self.logprobs)[is_token]
        sampled[in_completion] = np.asarray(self.mask)[is_token]
        return Padded(
            token_ids=ids,
            positions=np.where(in_prompt | in_completion, column - first, 0).astype(np.int32),
            attention_mask=in_prompt | in_completion,
            completion_mask=sampled,
            logprobs=logprobs,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Padded:
    """Rows of prompt and completion, as a training step takes them. A pytree."""

    token_ids: Array  # int32[N, L]
    positions: Array  # int32[N, L], from 0 at the first token of the prompt; 0 where padded
    attention_mask: Array  # bool[N, L]: True for prompt and completion
    completion_mask: Array  # bool[N, L]: True for what was sampled
    logprobs: Array  # float32[N, L]: at the time of sampling; 0 elsewhere


def to_padded(rollout: Rollout, *lengths: int | None, **options: Any) -> Padded:
    """See `Rollout.to_padded`."""
    return rollout.to_padded(*lengths, **options)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The contents of a row of a `Rollout`, without padding."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: np.ndarray  # float32[tokens]
    sampled: np.ndarray  # bool[tokens]
    prompt_index: int
    num_cached: int
    seed: int
    finish_reason: str
    weight_versions: tuple[Span, ...]
    text: str


def make_rollout(
    outputs: Sequence[RequestOutput],
    seeds: Sequence[int],
    *,
    pad_id: int,
    temperature: float,
    logprobs_mode: str,
    version_of: Callable[[int], int],
) -> Rollout:
    """A rollout of final outputs with flat logprobs.

    `version_of`: from the number of replacements of the weights to their version.
    """
    rows = [
        Row(
            prompt_ids=output.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=_sampled(completion),
            sampled=np.ones(len(completion.token_ids), bool),
            prompt_index=index,
            num_cached=output.num_cached_tokens,
            seed=seeds[index],
            finish_reason=str(completion.finish_reason),
            weight_versions=_spans(completion, version_of),
            text=completion.text,
        )
        for index, output in enumerate(outputs)
        for completion in output.outputs
    ]
    return stack_rows(rows, pad_id=pad_id, temperature=temperature, logprobs_mode=logprobs_mode)


def stack_rows(
    rows: Sequence[Row], *, pad_id: int, temperature: float, logprobs_mode: str
) -> Rollout:
    """The rows, padded to the longest prompt and the longest completion."""
    lengths = np.array([len(row.token_ids) for row in rows], np.int32)
    prompt_lengths = np.array([len(row.prompt_ids) for row in rows], np.int32)
    shape = (len(rows), lengths.max(initial=0))
    token_ids = np.full(shape, pad_id, np.int32)
    logprobs, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    prompt_ids = np.full((len(rows), prompt_lengths.max(initial=0)), pad_id, np.int32)
    for i, row in enumerate(rows):
        token_ids[i, : lengths[i]] = row.token_ids
        logprobs[i, : lengths[i]] = row.logprobs
        mask[i, : lengths[i]] = row.sampled
        prompt_ids[i, prompt_ids.shape[1] - prompt_lengths[i] :] = row.prompt_ids
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        lengths=lengths,
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_indices=np.array([row.prompt_index for row in rows], np.int32),
        num_cached=np.array([row.num_cached for row in rows], np.int32),
        # Seeds may be any ints, also larger than int64. The engine reduces them in the same way.
        seeds=np.array([-1 if row.seed == -1 else row.seed % 2**32 for row in rows], np.int64),
        finish_reasons=tuple(row.finish_reason for row in rows),
        weight_versions=tuple(row.weight_versions for row in rows),
        texts=tuple(row.text for row in rows),
        pad_id=pad_id,
        temperature=temperature,
        logprobs_mode=logprobs_mode,
    )


def _sampled(completion: CompletionOutput) -> np.ndarray:
    """float32[tokens]: the first logprobs entry of each token, which is the sampled one's."""
    flat: Any = completion.logprobs
    if flat is None:
        return np.zeros(0, np.float32)
    return np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)]


def _spans(completion: CompletionOutput, version_of: Callable[[int], int]) -> tuple[Span, ...]:
    num_tokens = len(completion.token_ids)
    spans = completion.weight_versions
    if spans is None:
        spans = [(0, 0, num_tokens)] if num_tokens else []
    return tuple((version_of(number), start, end) for number, start, end in spans)


def _width(name: str, wanted: int | None, lengths: np.ndarray) -> int:
    longest = int(lengths.max(initial=0))
    if wanted is not None and wanted < longest:
        raise ValueError(f"{name}={wanted} is too short: the longest has {longest} tokens")
    return longest if wanted is None else wanted
