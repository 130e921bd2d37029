"""Logprobs in the formats of OpenAI's two APIs, and of vLLM's for token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpage.outputs import Logprob

LEAST = -9999.0  # JSON has no -Infinity; vLLM's number

Entries = Mapping[int, Logprob]


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Iterable[Entries | None],
    *,
    as_ids: bool,
    offset: int = 0,
    unscored: str | None = None,
    num_added: int = 0,
) -> dict[str, Any]:
    """For `/v1/completions`. `offset`: characters of the text before the first token.

    The first token of a prompt has no entry; `unscored` is its text, None without a tokenizer. The first `num_added`
    tokens are not in the text.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    best: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        token = _text(token_id, entry.get(token_id) if entry else None, as_ids=as_ids)
        if not entry and not as_ids and unscored is not None:
            token = unscored
        tokens.append(token)
        offsets.append(offset)
        offset += len(token) if position >= num_added else 0
        if not entry:
            logprobs.append(None)
            best.append(None)
            continue
        logprobs.append(_finite(entry[token_id]) if token_id in entry else None)
        best.append({_text(i, e, as_ids=as_ids): _finite(e) for i, e in _best_first(entry)})
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": best,
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: Sequence[int], entries: Iterable[Entries], num_best: int, *, as_ids: bool
) -> dict[str, Any]:
    """For `/v1/chat/completions`, with the `num_best` most likely tokens at each position; -1: all."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        best = _best_first(entry)
        best = best if num_best < 0 else best[:num_best]
        content.append(
            _named(token_id, entry[token_id], as_ids=as_ids)
            | {"top_logprobs": [_named(i, e, as_ids=as_ids) for i, e in best]}
        )
    return {"content": content}


def generate_logprobs(
    token_ids: Sequence[int], entries: Iterable[Entries], num_best: int
) -> dict[str, Any]:
    """For `/inference/v1/generate`: of each position the sampled token, then the best ones, `num_best` in all.

    There is at least one; -1: all.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        others = [(i, e) for i, e in entry.items() if i != token_id]
        top = [(token_id, entry[token_id]), *others]
        top = top if num_best < 0 else top[: max(num_best, 1)]
        content.append(
            _ranked(token_id, entry[token_id]) | {"top_logprobs": [_ranked(*each) for each in top]}
        )
    return {"content": content}


def _ranked(token_id: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": _finite(entry), "rank": entry.rank or None}


def prompt_logprobs(entries: Iterable[Entries | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's extra: for each prompt token a dict from id to its values; None for the first."""
    if entries is None:
        return None
    return [
        {
            str(i): {
                "logprob": _finite(e),
                "rank": e.rank,
                "decoded_token": e.decoded_token,
            }
            for i, e in entry.items()
        }
        if entry
        else None
        for entry in entries
    ]


def token_id_logprobs(rows: np.ndarray | None) -> list[list[float]] | None:
    """For each prompt token the values of the ids that were given for it."""
    return None if rows is None else np.fmax(rows, np.float32(LEAST)).tolist()


def _named(token_id: int, entry: Logprob, *, as_ids: bool) -> dict[str, Any]:
    text = entry.decoded_token
    return {
        "token": _text(token_id, entry, as_ids=as_ids),
        "logprob": _finite(entry),
        "bytes": None if text is None else list(text.encode()),  # of the text, also with `as_ids`
    }


def _text(token_id: int, entry: Logprob | None, *, as_ids: bool) -> str:
    # Without a tokenizer there are no texts.
    if as_ids or entry is None or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


def _best_first(entry: Entries) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: -item[1].logprob)


def _finite(entry: Logprob) -> float:
    # JSON has no NaN either.
    return max(entry.logprob, LEAST) if entry.logprob == entry.logprob else LEAST
