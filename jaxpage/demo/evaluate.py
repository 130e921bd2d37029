"""Held-out accuracy: the share of questions that the model answers word for word.

Names and sums are from the split that is not used for training.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tokenizers import Tokenizer

from jaxpage.demo import network, text, tokens, words
from jaxpage.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxpage import LLM

SUITES: dict[str, tuple[text.Kind, int]] = {  # name -> kind, rows of the table or digits
    **{f"look-up {rows}": ("look_up", rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)},
    **{f"json {rows}": ("json", rows) for rows in (3, 8, 16)},
    "sum 0..99": ("sum", 2),
    "sum 0..999": ("sum", 3),
    "talk": ("talk", 0),
}
_ROWS = 20  # questions per launch


def question(rng: random.Random, kind: text.Kind, size: int) -> tuple[str | None, text.Turn]:
    """A system message, if any, and a held-out turn; `size` is the number of rows in the table, or of digits."""
    if kind == "sum":
        return None, text.addition(rng, size, split="held_out")
    if kind == "talk":
        return None, text.talk(rng)
    people = text.people(rng, size, split="held_out")
    system = text.system_message(text.table(people), rng.choice(words.INTRODUCTIONS))
    ask = text.look_up if kind == "look_up" else text.json_record
    return system, ask(rng, people)


def questions_of(suite: str, count: int, seed: int) -> list[tuple[str | None, text.Turn]]:
    rng = random.Random(f"{seed}/{suite}")
    return [question(rng, *SUITES[suite]) for _ in range(count)]


def accuracy(
    params: network.Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    suites: Iterable[str] = tuple(SUITES),
    questions: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """Share of exact answers per suite. `questions` is rounded up to a multiple of 20.

    The correct answer is the input, and each of its tokens must be the most likely one: exactly then greedy decoding
    generates this answer.
    """
    result = {}
    for suite in suites:
        kind, size = SUITES[suite]
        table = size if kind in ("look_up", "json") else 0
        length = -(-(tokens.HEADER_TOKENS + tokens.ROW_TOKENS * table + 80) // 64) * 64
        asked = questions_of(suite, -(-questions // _ROWS) * _ROWS, seed)
        texts = [tokens.said(system, [turn]) for system, turn in asked]
        wrong = 0
        for first in range(0, len(texts), _ROWS):
            batch = tokens.pack(tokenizer, texts[first : first + _ROWS], length, 48 * _ROWS)
            wrong += num_wrong(network.logits, params, config, batch)
        result[suite] = 1 - wrong / len(texts)
    return result


def answered(llm: LLM, suite: str, *, questions: int, seed: int = 0) -> float:
    """Share of a suite's questions that an engine answers word for word with greedy decoding."""
    from jaxpage import SamplingParams

    asked = questions_of(suite, questions, seed)
    outputs = llm.chat(
        [text.messages(system, [turn]) for system, turn in asked],
        SamplingParams(temperature=0, max_tokens=64),
        use_tqdm=False,
    )
    answers = [output.outputs[0].text for output in outputs]
    right = [said == turn.answer for said, (_, turn) in zip(answers, asked, strict=True)]
    return sum(right) / questions


def num_wrong(
    logits: Callable[..., jax.Array], params: network.Params, config: ModelConfig, batch: Any
) -> int:
    """How many rows of a batch have a target that is not the most likely next token; `logits` of a `network`."""
    said = np.asarray(_answers(logits, config)(params, batch))
    differs = (said != batch.targets) & (batch.weights > 0)
    return len(np.unique(batch.selected[differs] // batch.tokens.shape[1]))


@functools.lru_cache(maxsize=4)
def _answers(logits: Callable[..., jax.Array], config: ModelConfig) -> jax.stages.Wrapped:
    """int32[S]: the most likely next token at each selected position of a batch."""
    return jax.jit(lambda params, batch: logits(params, config, batch).argmax(axis=-1))
