"""Prompts with pictures for tiny models, and greedy answers of engines that are those of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpage import LLM, SamplingParams
from jaxpage.outputs import CompletionOutput
from jaxpage.pictures.border import Picture

BIAS = -100.0
# (processor's config, tokens, pictures) -> the logits after each token, float[T, V].
Logits = Callable[[Any, list[int], list[Picture]], np.ndarray]


def greedy(never: range) -> SamplingParams:
    """never: tokens that stand for pictures in a prompt, and do not in an answer: transformers would miss the
    pictures.
    """
    bias = dict.fromkeys(never, BIAS)
    return SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logit_bias=bias)


def seeing(placeholder: list[int], *parts: list[int] | np.ndarray) -> dict:
    """A prompt of texts and pictures. placeholder: tokens in the place of a picture."""
    ids: list[int] = []
    images = [part for part in parts if isinstance(part, np.ndarray)]
    for part in parts:
        ids += part if isinstance(part, list) else placeholder
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def checked_answer(
    llm: LLM, processor: Any, logits_of: Logits, params: SamplingParams, prompt: Any
) -> list[int]:
    """The answer to a prompt that is nowhere cached, whose tokens and log-probabilities are those of transformers.
    params: of `greedy`.
    """
    ids, images = prompt, []
    if isinstance(prompt, dict):
        ids, images = prompt["prompt_token_ids"], prompt["multi_modal_data"]["image"]
    pictures = [processor.image(image) for image in images]
    expanded = processor.expand(list(ids), pictures).token_ids
    parts = [part for picture in pictures for part in picture.parts]
    (output,) = llm.generate(prompt, dataclasses.replace(params, logprobs=1), use_tqdm=False)
    (answer,) = output.outputs
    assert (output.prompt_token_ids, output.num_cached_tokens) == (expanded, 0)
    logits = logits_of(processor.config, [*expanded, *answer.token_ids], parts)
    check_answer(answer, logits[len(expanded) - 1 : -1], params)
    return list(answer.token_ids)


def check_answer(answer: CompletionOutput, logits: np.ndarray, params: SamplingParams) -> None:
    """logits: transformers', before each token of the answer; params: of `greedy`."""
    assert answer.logprobs is not None and params.logit_bias is not None
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [row[i].logprob for row, i in zip(answer.logprobs, answer.token_ids, strict=True)]
    wanted = logprobs[np.arange(len(found)), answer.token_ids]
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    logits = logits.copy()
    logits[:, list(params.logit_bias)] += BIAS
    assert answer.token_ids == logits.argmax(-1).tolist()
