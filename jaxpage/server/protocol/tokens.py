"""`/tokenize`, `/detokenize`, and `/inference/v1/generate`: token ids in and out."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxpage.server.protocol.chat import TemplateFields
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.sampling import OpenModel, RequestId, StreamOptions


class TokenizeCompletion(OpenModel):
    """For a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(TemplateFields):
    """For a conversation, rendered by the chat template."""

    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(OpenModel):
    """Token ids to text."""

    model: str | None = None
    tokens: ListOf[int] = Field(max_length=1_000_000)


class GenerateRequest(OpenModel):
    """vLLM's request with token ids as input and output. `sampling_params` are fields of `SamplingParams`."""

    token_ids: ListOf[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: RequestId | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int = 0
