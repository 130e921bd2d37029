"""Held-out accuracy: which share of answers the model would give word for word.

Names and sums come from the split that training never sees. The right answer is put in and every
token of it must be the most likely one: then, and only then, greedy decoding gives that answer.
`answered` asks an engine instead (`jaxpage bench accuracy`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import numpy as np
from tokenizers import Tokenizer

from jaxpage.demo import network, text, tokens
from jaxpage.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxpage import LLM

SUITES: dict[str, tuple[text.Kind, int]] = {  # name -> kind, rows of the table
    **{f"look-up {rows}": ("look_up", rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)},
    **{f"json {rows}": ("json", rows) for rows in (3, 8, 16)},
    "sum 0..99": ("sum", 2),
    "sum 0..999": ("sum", 3),
    "talk": ("talk", 0),
}
_ROWS = 20  # questions per launch


def question(rng: random.Random, kind: text.Kind, size: int) -> tuple[str | None, text.Turn]:
    """A system message, if any, and a held-out turn; `size` is rows of the table, or digits."""
    if kind == "sum":
        return None, text.addition(rng, size, split="held_out")
    if kind == "talk":
        return None, text.talk(rng)
    people = text.people(rng, size, split="held_out")
    system = text.system_message(text.table(people), rng.choice(text.INTRODUCTIONS))
    ask = text.look_up if kind == "look_up" else text.json_record
    return system, ask(rng, people)


def accuracy(
    params: network.Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    suites: Iterable[str] = tuple(SUITES),
    questions: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """Share of exact answers per suite. `questions` is rounded up to a multiple of 20."""
    result = {}
    for suite in suites:
        kind, size = SUITES[suite]
        rng = random.Random(f"{seed}/{suite}")
        table = size if kind in ("look_up", "json") else 0
        length = -(-(tokens.HEADER_TOKENS + tokens.ROW_TOKENS * table + 80) // 64) * 64
        right = 0
        launches = -(-questions // _ROWS)
        for _ in range(launches):
            texts = [
                tokens.said(s, [t]) for s, t in (question(rng, kind, size) for _ in range(_ROWS))
            ]
            batch = tokens.pack(tokenizer, texts, length, 48 * _ROWS)
            said = np.asarray(_answers(config)(params, batch))
            wrong = (said != batch.targets) & (batch.weights > 0)
            right += _ROWS - len(np.unique(batch.selected[wrong] // length))
        result[suite] = right / (launches * _ROWS)
    return result


def answered(llm: LLM, suite: str, *, questions: int, seed: int = 0) -> float:
    """Share of questions of a suite that an engine answers word for word, greedily."""
    from jaxpage import SamplingParams

    kind, size = SUITES[suite]
    rng = random.Random(f"{seed}/{suite}")
    asked = [question(rng, kind, size) for _ in range(questions)]
    outputs = llm.chat(
        [text.messages(system, [turn]) for system, turn in asked],
        SamplingParams(temperature=0, max_tokens=64),
        use_tqdm=False,
    )
    right = [
        output.outputs[0].text == turn.answer
        for output, (_, turn) in zip(outputs, asked, strict=True)
    ]
    return sum(right) / questions


@functools.lru_cache(maxsize=4)
def _answers(config: ModelConfig) -> jax.stages.Wrapped:
    return jax.jit(lambda params, batch: network.answers(params, config, batch))
