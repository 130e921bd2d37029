"""What vLLM's sampler does to the logits of one request, in plain NumPy and one token at a time; and request states.

Written from the definition of each parameter, not from the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from jaxpage.reasoning import MAX_MARKER_LEN
from jaxpage.sampling.constraints import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    pack_mask,
)
from jaxpage.sampling.features import processor_bits
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.thinking import THINKING

MARKERS = ("think_start", "think_end", "think_forced_end")
(THINKING_BIT,) = processor_bits((THINKING,))
CLEAR = 1e-5  # closer than this to a boundary float32 may decide either way


@dataclass(kw_only=True)
class Row:
    """One request as a user sees it."""

    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_ids: list[int] = field(default_factory=list)
    allowed_ids: list[int] | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)
    thinking_budget: int = -1
    think_start: list[int] = field(default_factory=list)
    think_end: list[int] = field(default_factory=list)
    think_forced_end: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def make_state(rows: list[Row], vocab_size: int, max_len: int = 64) -> RequestState:
    """The device state with rows[i] in slot i + 1; slot 0 is all zeros, as the runner allocates it."""
    num_slots, words = len(rows) + 1, -(-vocab_size // 32)

    def column(name, dtype):
        return np.array([0, *(getattr(r, name) for r in rows)], dtype)

    history = np.random.default_rng(0).integers(0, vocab_size, (num_slots, max_len))  # garbage
    stop, allowed = (np.zeros((num_slots, words), np.uint32) for _ in range(2))
    bias_ids = np.full((num_slots, MAX_LOGIT_BIAS), vocab_size)
    bias_values = np.zeros((num_slots, MAX_LOGIT_BIAS), np.float32)
    bad_words = np.full((num_slots, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1)
    for i, row in enumerate(rows, 1):
        history[i, : row.position] = row.prompt + row.output
        stop[i] = pack_mask(row.stop_ids, vocab_size)
        allowed[i] = 2**32 - 1
        if row.allowed_ids is not None:
            allowed[i] = pack_mask(row.allowed_ids, vocab_size)
        bias_ids[i, : len(row.logit_bias)] = list(row.logit_bias)
        bias_values[i, : len(row.logit_bias)] = list(row.logit_bias.values())
        for j, word in enumerate(row.bad_words):
            bad_words[i, j, -len(word) :] = word
    markers = {name: np.full((num_slots, MAX_MARKER_LEN), -1) for name in MARKERS}
    for name, ids in markers.items():
        for i, row in enumerate(rows, 1):
            marker = getattr(row, name)
            ids[i, : len(marker)] = marker
    prompt_len = [0, *(len(r.prompt) for r in rows)]
    min_len = [0, *(len(r.prompt) + r.min_tokens for r in rows)]
    thinking_budget = column("thinking_budget", np.int32)
    thinking_budget[0] = -1
    floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    # In NumPy: jax would compile zeros and ones of every size.
    state = RequestState(
        token_ids=np.array(history, np.int32),
        block_tables=np.zeros((num_slots, 1, 1), np.int32),
        finished=np.zeros(num_slots, bool),
        prompt_len=np.array(prompt_len, np.int32),
        min_len=np.array(min_len, np.int32),
        max_len=np.full(num_slots, max_len, np.int32),
        seed=column("seed", np.uint32),
        sequence_index=np.zeros(num_slots, np.int32),
        first_token=np.zeros(num_slots, np.int32),
        top_k=column("top_k", np.int32),
        thinking_budget=thinking_budget,
        asked_processors=np.where(thinking_budget < 0, 0, THINKING_BIT),
        repetition_penalty=column("repetition_penalty", np.float32),
        stop_mask=stop,
        min_tokens_mask=stop,
        step_mask=np.full((num_slots, words), 2**32 - 1, np.uint32),
        allowed_mask=allowed,
        bias_ids=np.array(bias_ids, np.int32),
        bias_values=bias_values,
        bad_words=np.array(bad_words, np.int32),
        **{name: np.array(ids, np.int32) for name, ids in markers.items()},
        **{name: column(name, np.float32) for name in floats},
    )
    # Not `jnp.asarray`, which compiles a program for each shape.
    return jax.device_put(state)


def constrained(logits: np.ndarray, row: Row) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in range(len(out)):
        if row.allowed_ids is not None and token not in row.allowed_ids:
            out[token] = -np.inf
        if token in row.stop_ids and len(row.output) < row.min_tokens:
            out[token] = -np.inf
    for word in row.bad_words:
        before = word[:-1]
        if len(before) <= len(row.output) and row.output[len(row.output) - len(before) :] == before:
            out[word[-1]] = -np.inf
    for token, bias in row.logit_bias.items():
        out[token] += np.float32(bias)
    return out


def penalised(logits: np.ndarray, row: Row) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in set(row.prompt + row.output):
        penalty = np.float32(row.repetition_penalty)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(row.output):
        out[token] -= np.float32(row.frequency_penalty) * row.output.count(token)
        out[token] -= np.float32(row.presence_penalty)
    return out


def num_thinking(row: Row) -> int:
    """Tokens since the last start of reasoning that no end came behind; -1: the row does not reason."""
    known = row.prompt + row.output

    def last(marker):
        begins = range(len(known) - len(marker) + 1)
        return max((i for i in begins if known[i : i + len(marker)] == marker), default=-1)

    start = last(row.think_start)
    return len(known) - start - len(row.think_start) if start > last(row.think_end) else -1


def forced_token(row: Row) -> int | None:
    """The token that the row must write because its thinking budget is spent."""
    if row.thinking_budget < 0 or num_thinking(row) < row.thinking_budget:
        return None
    known, forced = row.prompt + row.output, row.think_forced_end
    written = [
        n for n in range(min(len(forced), len(known) + 1)) if known[len(known) - n :] == forced[:n]
    ]
    return forced[max(written)]


def with_forced_token(logits: np.ndarray, row: Row) -> np.ndarray:
    out, token = logits.copy(), forced_token(row)
    if token is not None:
        out[token] = 1e9
    return out


def truncated_bounds(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that must be kept, tokens that may be kept): they differ where float32 may decide either way."""
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    bounds = []
    for slack in (CLEAR, -CLEAR):
        kept = probs >= np.float64(min_p) * probs.max() * (1 + slack)
        kept[logits.argmax()] = True
        if 0 < top_k < kept.sum():
            kept &= logits >= np.sort(logits[kept])[-top_k]
        left = np.where(kept, probs, 0) / probs[kept].sum()
        if top_p < 1:
            above = np.array([left[left > p].sum() for p in left])
            kept &= above < np.float64(top_p) - slack
            kept[logits >= logits.max()] = True
        bounds.append(kept)
    return bounds[0], bounds[1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    best = logits.max(-1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))
