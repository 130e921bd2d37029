"""The request bodies of TRL's `VLLMClient`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field

from jaxpage.input_processor import InputProcessor
from jaxpage.pictures.decode import decode
from jaxpage.pictures.sources import MediaSources
from jaxpage.prompts import Prompt
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.sampling import OpenModel, make_params
from jaxpage.structured_outputs.params import to_structured_outputs

_SAMPLING = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs",
)  # fmt: skip


class _Body(OpenModel):
    stream: Literal[False] = False
    request_id: None = None


class Sampling(_Body):
    """Sampling options; TRL's names and defaults."""

    n: int = Field(1, ge=1)
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = {}

    def params(self) -> SamplingParams:
        """Raises ValueError."""
        options = {name: getattr(self, name) for name in _SAMPLING} | self.generation_kwargs
        options["structured_outputs"] = to_structured_outputs(options.get("structured_outputs"))
        if self.structured_outputs_regex is not None:
            options["structured_outputs"] = to_structured_outputs(
                {"regex": self.structured_outputs_regex}
            )
        params = make_params(options)
        return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


class Generate(Sampling):
    """Texts, or token ids, to continue."""

    prompts: ListOf[str] | ListOf[ListOf[int]] = Field(min_length=1)
    images: ListOf[ListOf[str] | None] | None = None  # per prompt, in base64

    def parse(self, inputs: InputProcessor) -> list[Prompt]:
        """Raises ValueError."""
        if self.images is not None and len(self.images) != len(self.prompts):
            raise ValueError(f"there are {len(self.images)} images for {len(self.prompts)} prompts")
        given: list[dict[str, Any]] = [
            {"prompt": each} if isinstance(each, str) else {"prompt_token_ids": each}
            for each in self.prompts
        ]
        for prompt, images in zip(given, self.images or (), strict=False):
            if images:
                pixels = [decode(MediaSources().read(_data_url(each))) for each in images]
                prompt["multi_modal_data"] = {"image": pixels}
        return list(inputs.parse(given))


class Chat(Sampling):
    """Conversations to continue."""

    messages: ListOf[ListOf[dict[str, Any]]] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}
    tools: ListOf[dict[str, Any]] | None = None

    def parse(self, inputs: InputProcessor) -> list[Prompt]:
        """Raises ValueError."""
        messages = [[_with_urls(message) for message in each] for each in self.messages]
        kwargs = self.chat_template_kwargs
        # The template gets the tools as they were written, as TRL's server has it from vLLM's `LLM.chat`; in
        # `/v1/chat/completions` it gets only OpenAI's fields of them.
        return list(inputs.parse_chat(messages, tools=self.tools, chat_template_kwargs=kwargs))


class Score(_Body):
    """Sequences whose tokens after the prompt are scored."""

    sequences: ListOf[ListOf[int]] = Field(min_length=1)
    prompt_lengths: ListOf[int]
    top_logprobs: int = Field(100, ge=0)
    temperature: float = 1.0
    response_format: Literal["json", "binary"] = "json"

    def check(self) -> None:
        """Raises ValueError."""
        if len(self.prompt_lengths) != len(self.sequences):
            raise ValueError(
                f"prompt_lengths has {len(self.prompt_lengths)} numbers for {len(self.sequences)} sequences"
            )
        for i, (tokens, length) in enumerate(zip(self.sequences, self.prompt_lengths, strict=True)):
            if not 0 <= length <= len(tokens):
                raise ValueError(f"prompt_lengths {i} is {length}, of {len(tokens)} tokens")
        if self.temperature != 1:
            raise ValueError(f"temperature={self.temperature} cannot be scored with, only 1")


def _data_url(encoded: str) -> str:
    return f"data:image/png;base64,{encoded}"


def _with_urls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with TRL's base64 pictures as data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": _data_url(part["image_pil"])}}
        if isinstance(part, dict) and isinstance(part.get("image_pil"), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}
