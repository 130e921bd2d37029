"""The forms of a prompt as types, under vLLM's names; a plain dict of the same keys does as well."""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict

import numpy as np


class TextPrompt(TypedDict):
    """A text, which the tokenizer makes ids of."""

    prompt: str
    cache_salt: NotRequired[str]  # prompts of different salts share no cached KV


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is the text that they stand for, if that is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Embeddings in the place of tokens; needs `enable_prompt_embeds=True`."""

    prompt_embeds: np.ndarray  # [T, E]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | TextPrompt | list[int] | TokensPrompt | EmbedsPrompt
