"""The forms of a prompt as types, under vLLM's names; a plain dict of the same keys does as well."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np


class MultiModalData(TypedDict, total=False):
    """Pictures of a prompt, which has a placeholder for each: PIL images, or uint8 arrays [height, width, 3].

    A video is an array [frames, height, width, 3] or a list of frames; or a tuple of that and {"fps": frames per
    second}, which is 2 by default.
    """

    image: Any  # one, or a list of them
    video: Any


class TextPrompt(TypedDict):
    """A text, which is tokenised."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalData]
    cache_salt: NotRequired[str]  # prompts with different salts share no cached KV


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is their text, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalData]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Embeddings instead of tokens; needs `enable_prompt_embeds=True`."""

    prompt_embeds: np.ndarray  # [T, E]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | TextPrompt | list[int] | TokensPrompt | EmbedsPrompt
