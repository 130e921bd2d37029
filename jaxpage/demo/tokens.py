"""From text to training batches: the tokenizer of the demo model, and conversations packed into rows.

Every name, job and country is one token, after a space and (except last names) after a quotation mark, so a row of a
table always has twelve tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from jaxpage.demo import text, words
from jaxpage.tiny import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS, train_byte_level_bpe

TURN_TOKENS = {"look_up": 32, "json": 45, "sum": 30, "talk": 25, "story": 85}  # on average
# Kinds of turns, with weights, after a table and without one.
TABLE_TALK: dict[text.Kind, float] = {
    "look_up": 0.62,
    "json": 0.25,
    "sum": 0.05,
    "talk": 0.05,
    "story": 0.03,
}
OTHER_TALK: dict[text.Kind, float] = {"sum": 0.65, "talk": 0.15, "story": 0.2}
ROW_TOKENS, HEADER_TOKENS = 12, 36


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum."""

    start: int  # the first step that may use it
    rows: int  # tables have 1 to `rows` people
    length: int  # tokens of a training row
    tables: float = 0.75  # share of the conversations with a table


class Batch(NamedTuple):
    """Rows of tokens, and the positions whose next token is a target; the rest is padding with weight 0."""

    tokens: np.ndarray  # int32[B, T]
    selected: np.ndarray  # int32[S], positions in the flattened rows
    targets: np.ndarray  # int32[S], the token after each
    weights: np.ndarray  # float32[S]


def train_tokenizer() -> Tokenizer:
    """The tokenizer of the demo model; digits are separate tokens."""
    rng = random.Random(0)
    texts = [conversation(rng, rows=12, length=400) for _ in range(3000)]
    quoted = words.FIRST_NAMES + words.OCCUPATIONS + words.COUNTRIES
    spaced = words.FIRST_NAMES + words.LAST_NAMES + words.OCCUPATIONS + words.COUNTRIES
    texts += [f"x {word}" for word in spaced] * 50 + [f' "{word}"' for word in quoted] * 50
    for special in SPECIAL_TOKENS:
        texts = [one.replace(special, "") for one in texts]
    # The limit is higher than the number of pairs to merge.
    return train_byte_level_bpe(texts, vocab_size=2560, min_frequency=5)


def said(system: str | None, turns: Sequence[text.Turn]) -> str:
    """A conversation with its last answer, in ChatML, formatted as by `tiny.CHAT_TEMPLATE`."""
    answer = {"role": "assistant", "content": turns[-1].answer}
    messages = [*text.messages(system, turns), answer]
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


def conversation(rng: random.Random, *, rows: int, length: int, tables: float = 0.75) -> str:
    """A conversation of at least about `length` tokens, with chance `tables` about a table of 1 to `rows` people."""
    if rng.random() < tables:
        most = min(rows, (length - HEADER_TOKENS - 80) // ROW_TOKENS)
        people = text.people(rng, rng.randint(1, most))
        system = text.system_message(text.table(people), rng.choice(words.INTRODUCTIONS))
        used, weights = HEADER_TOKENS + ROW_TOKENS * len(people), TABLE_TALK
    else:
        people, system, used = [], rng.choice((None, *words.GREETINGS)), 12
        weights = OTHER_TALK
    turns = []
    for turn in text.turns(rng, people, weights):
        turns.append(turn)
        used += TURN_TOKENS[turn.kind]
        if used > length:
            break
    return said(system, turns)


def answer_mask(tokenizer: Tokenizer, ids: Sequence[int]) -> np.ndarray:
    """bool[n]: whether each token is the assistant's, including its <|im_end|>."""
    start, end, assistant = map(tokenizer.token_to_id, (IM_START, IM_END, "assistant"))
    said, mask = np.array(ids), np.zeros(len(ids), bool)
    ends = np.flatnonzero(said == end)
    for begin in np.flatnonzero((said[:-1] == start) & (said[1:] == assistant)):
        last = next(iter(ends[ends > begin]), len(ids))  # the row may cut off an answer
        mask[begin + 3 : last + 1] = True  # from after the newline
    return mask


def pack(tokenizer: Tokenizer, texts: Sequence[str], length: int, selected: int) -> Batch:
    """The texts as rows of `length` tokens, cut or padded, with at most `selected` targets."""
    tokens = np.full((len(texts), length), tokenizer.token_to_id(END_OF_TEXT), np.int32)
    positions, targets = [], []
    for row, encoding in enumerate(tokenizer.encode_batch(list(texts), add_special_tokens=False)):
        ids = np.array(encoding.ids[: length + 1], np.int32)
        tokens[row, : len(ids)] = ids[:length]
        wanted = np.flatnonzero(answer_mask(tokenizer, ids.tolist()))
        positions.append(row * length + wanted - 1)
        targets.append(ids[wanted])
    where, what = np.concatenate(positions)[:selected], np.concatenate(targets)[:selected]
    padding = (0, selected - len(where))
    return Batch(
        tokens=tokens,
        selected=np.pad(where, padding).astype(np.int32),
        targets=np.pad(what, padding).astype(np.int32),
        weights=np.pad(np.ones(len(where), np.float32), padding),
    )


def training_batch(
    tokenizer: Tokenizer, stage: Stage, *, tokens: int, seed: int, step: int
) -> Batch:
    """The batch of one step, with about `tokens` tokens; a function of the arguments."""
    rng, length = random.Random(f"{seed}/{step}"), stage.length
    texts = [
        conversation(rng, rows=stage.rows, length=length, tables=stage.tables)
        for _ in range(max(1, tokens // length))
    ]
    return pack(tokenizer, texts, length, len(texts) * length * 2 // 5)
