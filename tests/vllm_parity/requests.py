"""Requests drawn at random. Values follow what the model says anyway, so that they matter: its words are stopped at,
forbidden and preferred.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.vllm_parity.engines import MAX_MODEL_LEN, Answer, Request

VOCAB_SIZE = 1903
EOS, OTHER_EOS = 2, 7  # ids; the second is only in the generation config of one of the models
SPECIAL = (0, 1, 2)
START, START_ID = "<|im_start|>", 1  # of reasoning
FIRST_WORDS = [
    "Hello, what is", "The", "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was", '{"name": "', "1 + 1 =", "naïve café, 東京 and 🙂", "a",
    "<|im_start|>Let me think. First", "<|im_start|>user\n12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "What color is the sky? The color of the sky is the same as",
]  # fmt: skip


@dataclass
class Drawing:
    """What values are drawn from: chance, a prompt, and what the model says to it greedily."""

    rng: random.Random
    prompt_len: int  # tokens
    token_ids: list[int]
    text: str

    def some_ids(self, most: int) -> list[int]:
        """Of what the model says, of the special ones, and any."""
        rng = self.rng
        pool = [
            rng.choice(self.token_ids),
            rng.randrange(VOCAB_SIZE),
            rng.choice((*SPECIAL, OTHER_EOS)),
        ]
        count = rng.randint(1, most)
        return [rng.choice([*pool, rng.randrange(VOCAB_SIZE)]) for _ in range(count)]

    def some_text(self, longest: int) -> str:
        """A piece of what the model says, or a word."""
        rng = self.rng
        start = rng.randrange(max(1, len(self.text)))
        piece = self.text[start : start + rng.randint(1, longest)]
        said = piece and rng.random() < 0.8
        return piece if said else rng.choice(["the", " a", "é", "\n", "xyz"])


def draw(seed: str, count: int, said: list[tuple[str | list[int], Answer]]) -> list[Request]:
    """`count` requests. `said`: prompts, and greedy answers to them."""
    requests = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        prompt, answer = rng.choice(said)
        (completion,) = answer["completions"]
        drawing = Drawing(
            rng=rng,
            prompt_len=len(answer["prompt_token_ids"]),
            token_ids=completion["token_ids"],
            text=completion["text"],
        )
        requests.append({"prompt": prompt, "fields": _fields(drawing)})
    return requests


def _fields(drawing: Drawing) -> dict[str, Any]:
    rng = drawing.rng
    fields: dict[str, Any] = _sampling(rng)
    fields["max_tokens"] = rng.choice([1, 2, 3, 8, 16, 24, 24, 32, 32, None])
    most = rng.choice([0.1, 0.25, 0.4])  # few fields are easier to understand, many meet each other
    for name, (share, value) in VALUES.items():
        if rng.random() < most * share:
            fields[name] = value(drawing)
    fields = _without_contradictions(fields)
    if rng.random() < 0.08:
        fields |= rng.choice(WRONG)(drawing)
    return fields


def _without_contradictions(fields: dict[str, Any]) -> dict[str, Any]:
    """What both engines refuse is among WRONG."""
    if fields.get("detokenize") is False:
        fields.pop("stop", None)
    if "logprob_token_ids" in fields:
        fields.pop("logprobs", None)
    if fields.get("truncate_prompt_tokens") is not None:
        fields.pop("prompt_logprob_token_ids", None)
    if "min_tokens" in fields:
        fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"] or MAX_MODEL_LEN)
    return fields


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy, or of the best token alone."""
    if rng.random() < 0.75:
        return {"temperature": 0.0}
    fields = {"temperature": rng.choice([1e-6, 0.005, 0.3, 1.0, 2.0]), "top_k": 1}
    if rng.random() < 0.5:
        fields |= {"top_p": rng.choice([0.1, 0.9, 1.0]), "min_p": rng.choice([0.0, 0.2, 1.0])}
    if rng.random() < 0.3:
        fields["seed"] = rng.randrange(-1, 1000)
    if rng.random() < 0.4:
        fields["n"] = rng.choice([2, 3])
    return fields


def _one(*values: Any) -> Callable[[Drawing], Any]:
    return lambda d: d.rng.choice(values)


def _stop(d: Drawing) -> str | list[str]:
    found = [d.some_text(5) for _ in range(d.rng.randint(1, 3))]
    return found[0] if d.rng.random() < 0.3 else found


def _biases(d: Drawing) -> dict[int, float]:
    return {i: d.rng.choice([-100.0, -5.0, -1.0, 0.5, 3.0, 8.0, 100.0]) for i in d.some_ids(5)}


def _allowed(d: Drawing) -> list[int]:
    said = [i for i in d.token_ids if d.rng.random() < 0.7]
    return [*said, *(d.rng.randrange(VOCAB_SIZE) for _ in range(d.rng.choice([1, 5, 100])))]


def _structured(d: Drawing) -> dict[str, Any]:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    return d.rng.choice(
        [
            {"choice": ["yes", "no", "I do not know"]},
            {"choice": [d.text[:3] or "a", d.text[:6] or "ab"]},
            {"regex": "[a-c]{2,4}[0-9]+"},
            {"regex": "(the|a) [a-z]+\\."},
            {"json": person},
            {"json": {"type": "array", "items": {"enum": [1, 2, "three"]}, "minItems": 1}},
            {"json_object": True},
            {"grammar": 'start: "x" num\nnum: /[0-9]{1,3}/'},
        ]
    )


def _repetition(d: Drawing) -> dict[str, int]:
    least = d.rng.randint(0, 2)
    return {
        "max_pattern_size": least + d.rng.randint(0, 3),
        "min_pattern_size": least,
        "min_count": d.rng.randint(2, 3),
    }


# Field -> (how often, relative to others; what draws a value).
VALUES: dict[str, tuple[float, Callable[[Drawing], Any]]] = {
    "presence_penalty": (1, _one(-2.0, -0.5, 0.0, 0.7, 2.0)),
    "frequency_penalty": (1, _one(-2.0, -0.3, 0.4, 2.0)),
    "repetition_penalty": (1, _one(0.5, 0.9, 1.0, 1.2, 3.0)),
    "logit_bias": (1, _biases),
    "allowed_token_ids": (0.5, _allowed),
    "bad_words": (1, lambda d: [d.some_text(6) for _ in range(d.rng.randint(1, 3))]),
    "min_tokens": (1, _one(0, 1, 3, 8, 20)),
    "stop": (1.2, _stop),
    "stop_token_ids": (1, lambda d: d.some_ids(3)),
    "ignore_eos": (1, _one(True, True, False)),
    "include_stop_str_in_output": (1.2, _one(True, True, False)),
    "skip_special_tokens": (1, _one(False, False, True)),
    "spaces_between_special_tokens": (1, _one(False, True)),
    "detokenize": (0.4, _one(False, True)),
    "logprobs": (1.5, _one(0, 1, 2, 5, 20, -1, True)),
    "prompt_logprobs": (1, _one(0, 1, 3, 20, -1, True)),
    "logprob_token_ids": (0.7, lambda d: list(dict.fromkeys(d.some_ids(6)))),
    "flat_logprobs": (1, _one(True, False)),
    "truncate_prompt_tokens": (0.7, _one(1, 2, 4, 50, -1)),
    "structured_outputs": (0.7, _structured),
    "repetition_detection": (1, _repetition),
    "thinking_token_budget": (1, _one(0, 1, 2, 5, 9, -1)),
    "skip_reading_prefix_cache": (0.5, _one(True, False)),
    "stream_interval": (0.3, _one(1, 3)),
    "prompt_logprob_token_ids": (0.1, lambda d: [[1, 2]] * (d.prompt_len - 1)),
}
# What at least one of the engines refuses.
WRONG: list[Callable[[Drawing], dict[str, Any]]] = [
    lambda d: {"n": d.rng.choice([0, 2, 20_000])},
    lambda d: {"temperature": d.rng.choice([-0.1, 2.5, float("nan")])},
    lambda d: {"presence_penalty": 2.5},
    lambda d: {"repetition_penalty": d.rng.choice([0.0, -1.0, float("inf")])},
    lambda d: {"top_k": d.rng.choice([-2, 1.5]), "temperature": 1.0},
    lambda d: {"top_p": d.rng.choice([0.0, 1.5])},
    lambda d: {"min_p": d.rng.choice([-0.1, 1.5])},
    lambda d: {"max_tokens": d.rng.choice([0, 10_000])},
    lambda d: {"min_tokens": d.rng.choice([-1, 33])},
    lambda d: {"min_tokens": MAX_MODEL_LEN, "max_tokens": None},
    lambda d: {"logprobs": -2},
    lambda d: {"prompt_logprobs": -2},
    lambda d: {"stop": ["a", ""]},
    lambda d: {"stop": "a", "detokenize": False},
    lambda d: {"stop_token_ids": d.rng.choice([[VOCAB_SIZE], [-1]])},
    lambda d: {"allowed_token_ids": d.rng.choice([[], [VOCAB_SIZE]])},
    lambda d: {"logit_bias": {d.rng.choice([-1, VOCAB_SIZE]): 1.0}},
    lambda d: {"bad_words": d.rng.choice([[""], ["  "]])},
    lambda d: {"logprob_token_ids": d.rng.choice([[], [VOCAB_SIZE], list(range(129))])},
    lambda d: {"logprob_token_ids": [5, 6, 7], "logprobs": 2},
    lambda d: {"structured_outputs": d.rng.choice([{}, {"choice": []}, {"regex": "("}])},
    lambda d: {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
    lambda d: {"thinking_token_budget": -2},
    lambda d: {"stream_interval": 0},
    lambda d: {"truncate_prompt_tokens": d.rng.choice([0, -2, MAX_MODEL_LEN, 200])},
    lambda d: {"trace_decode_token_ids": [5, 6]},
    lambda d: {"prompt_logprob_start": 1},
]
