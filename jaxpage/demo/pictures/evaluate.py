"""Held-out accuracy: the share of questions about pictures that the model answers word for word."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from jaxpage.demo.evaluate import num_wrong
from jaxpage.demo.pictures import examples, network, questions, scenes
from jaxpage.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxpage import LLM

SUITES = tuple(questions.ASKING)
_ROWS, _LENGTH, _ANSWER = 20, 128, 56  # questions per launch, tokens of each, and of an answer


def asked(suite: str, count: int, seed: int = 0) -> list[tuple[scenes.Scene, questions.Turn]]:
    """Held-out pictures, each with one question."""
    rng, found = random.Random(f"{seed}/{suite}"), []
    while len(found) < count:
        scene = scenes.scene(rng, split="held_out")
        turn = questions.ask(rng, scene, suite)
        if turn is not None:
            found.append((scene, turn))
    return found


def accuracy(
    params: network.Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    suites: Iterable[str] = SUITES,
    questions: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """Share of exact answers per suite. `questions` is rounded up to a multiple of 20.

    The correct answer is the input, and each of its tokens must be the most likely one: exactly then greedy decoding
    generates this answer.
    """
    result = {}
    for suite in suites:
        pairs = asked(suite, -(-questions // _ROWS) * _ROWS, seed)
        wrong = 0
        for first in range(0, len(pairs), _ROWS):
            some = [
                (scene, examples.said([turn], picture=True))
                for scene, turn in pairs[first : first + _ROWS]
            ]
            batch = examples.pack(tokenizer, some, length=_LENGTH, selected=_ANSWER * _ROWS)
            wrong += num_wrong(network.logits, params, config, batch)
        result[suite] = 1 - wrong / len(pairs)
    return result


def answered(llm: LLM, suite: str, *, questions: int, seed: int = 0) -> float:
    """Share of a suite's questions that an engine answers word for word with greedy decoding."""
    from jaxpage import SamplingParams

    pairs = asked(suite, questions, seed)
    outputs = llm.chat(
        [messages(scene, turn.question) for scene, turn in pairs],
        SamplingParams(temperature=0, max_tokens=_ANSWER),
        use_tqdm=False,
    )
    texts = [output.outputs[0].text for output in outputs]
    return sum(t == turn.answer for t, (_, turn) in zip(texts, pairs, strict=True)) / questions


def messages(scene: scenes.Scene, question: str) -> list[dict[str, object]]:
    """A question about a picture, in the format of `LLM.chat`."""
    parts = [
        {"type": "image_pil", "image_pil": scenes.draw(scene)},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": parts}]
