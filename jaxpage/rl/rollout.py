"""`Rollout`: what a sampler returns, as padded arrays; and the forms that trainers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpage.outputs import CompletionOutput, RequestOutput

Array = Any  # of NumPy, or of jax after `Rollout.device_put`
Span = tuple[int, int, int]  # (weight version, first token, token behind the last)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """N = prompts * n completions; the n of a prompt are next to each other. C, P: the longest completion and prompt.

    What is padding follows from `lengths`, never from an id, so the pad id may be sampled.
    """

    token_ids: Array  # int32[N, C], the stop token included, padded on the right
    logprobs: Array  # float32[N, C] of these tokens, as `logprobs_mode` says; 0 where padded
    mask: Array  # bool[N, C]: True where a token was sampled
    lengths: Array  # int32[N] of completions
    prompt_ids: Array  # int32[N, P], padded on the left
    prompt_lengths: Array  # int32[N]
    prompt_indices: Array  # int32[N]: which prompt of the call
    num_cached: Array  # int32[N]: prompt tokens found in the prefix cache
    seeds: Array  # int64[N]: of the request; -1 where the engine chose
    finish_reasons: tuple[str, ...]  # "stop", "length", "abort", "repetition"
    weight_versions: tuple[tuple[Span, ...], ...]  # which tokens were sampled with which weights
    texts: tuple[str, ...]  # "" without a tokenizer
    pad_id: int
    temperature: float  # that it was sampled at; 0: the most likely tokens
    logprobs_mode: (
        str  # "temperature": of logits / temperature over the whole vocabulary; "raw", "processed"
    )

    def __len__(self) -> int:
        return len(self.finish_reasons)

    def prompt(self, row: int) -> list[int]:
        """The prompt of a row, without padding."""
        width = self.prompt_ids.shape[1]
        return np.asarray(self.prompt_ids[row, width - int(self.prompt_lengths[row]) :]).tolist()

    def completion(self, row: int) -> list[int]:
        """What was sampled in a row, without padding."""
        return np.asarray(self.token_ids[row, : int(self.lengths[row])]).tolist()

    def device_put(self, sharding: Sharding | None = None) -> Rollout:
        """The same with arrays of jax, along `sharding` or on jax's default device."""
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

        Lengths default to the longest; give them to have one shape in every step. `side`: where a prompt is padded.
        "left": all completions begin in column `prompt_length`; "right": each follows its prompt, and all padding is at
        the end. Raises ValueError for a length that is too short.
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
        prompts, mask = np.asarray(self.prompt_ids), np.asarray(self.mask)
        is_prompt = np.arange(prompts.shape[1]) >= prompts.shape[1] - prompt_lengths[:, None]
        ids = np.full((len(self), total), self.pad_id if pad_id is None else pad_id, np.int32)
        logprobs = np.zeros(ids.shape, np.float32)
        # Both sides of an assignment have the tokens of one row behind those of another.
        ids[in_prompt] = prompts[is_prompt]
        ids[in_completion] = np.asarray(self.token_ids)[mask]
        logprobs[in_completion] = np.asarray(self.logprobs)[mask]
        return Padded(
            token_ids=ids,
            positions=np.where(in_prompt | in_completion, column - first, 0).astype(np.int32),
            attention_mask=in_prompt | in_completion,
            completion_mask=in_completion,
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
    logprobs: Array  # float32[N, L]: when it was sampled; 0 elsewhere


def to_padded(rollout: Rollout, *lengths: int | None, **options: Any) -> Padded:
    """See `Rollout.to_padded`."""
    return rollout.to_padded(*lengths, **options)


def make_rollout(
    outputs: Sequence[RequestOutput],
    seeds: Sequence[int],
    *,
    pad_id: int,
    temperature: float,
    logprobs_mode: str,
    versions: dict[int, int],
) -> Rollout:
    """Of final outputs with flat logprobs. `versions`: of weights by how often they had been replaced."""
    rows = [(i, o, c) for i, o in enumerate(outputs) for c in o.outputs]
    completions = [c for _, _, c in rows]
    lengths = np.array([len(c.token_ids) for c in completions], np.int32)
    prompt_lengths = np.array([len(o.prompt_token_ids) for _, o, _ in rows], np.int32)
    mask = np.arange(lengths.max(initial=0))[None] < lengths[:, None]
    token_ids = np.full(mask.shape, pad_id, np.int32)
    logprobs = np.zeros(mask.shape, np.float32)
    prompt_ids = np.full((len(rows), prompt_lengths.max(initial=0)), pad_id, np.int32)
    for row, (_, output, completion) in enumerate(rows):
        token_ids[row, : lengths[row]] = completion.token_ids
        logprobs[row, : lengths[row]] = _sampled(completion)
        prompt_ids[row, prompt_ids.shape[1] - prompt_lengths[row] :] = output.prompt_token_ids
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        lengths=lengths,
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        prompt_indices=np.array([i for i, _, _ in rows], np.int32),
        num_cached=np.array([o.num_cached_tokens for _, o, _ in rows], np.int32),
        seeds=np.array([seeds[i] for i, _, _ in rows], np.int64),
        finish_reasons=tuple(str(c.finish_reason) for c in completions),
        weight_versions=tuple(_spans(c, versions) for c in completions),
        texts=tuple(c.text for c in completions),
        pad_id=pad_id,
        temperature=temperature,
        logprobs_mode=logprobs_mode,
    )


def _sampled(completion: CompletionOutput) -> np.ndarray:
    """float32[tokens]: the first entry of each token is the sampled one's."""
    flat: Any = completion.logprobs
    if flat is None:
        return np.zeros(0, np.float32)
    return np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.int64)]


def _spans(completion: CompletionOutput, versions: dict[int, int]) -> tuple[Span, ...]:
    num_tokens = len(completion.token_ids)
    spans = completion.weight_versions
    if spans is None:
        spans = [(0, 0, num_tokens)] if num_tokens else []
    return tuple((versions[number], start, end) for number, start, end in spans)


def _width(name: str, wanted: int | None, lengths: np.ndarray) -> int:
    longest = int(lengths.max(initial=0))
    if wanted is not None and wanted < longest:
        raise ValueError(f"{name}={wanted} is too short: the longest has {longest} tokens")
    return longest if wanted is None else wanted
