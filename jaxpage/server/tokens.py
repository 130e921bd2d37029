"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from jaxpage.input_processor import InputProcessor
from jaxpage.server.context import Server
from jaxpage.server.protocol.tokens import DetokenizeRequest, TokenizeChat, TokenizeCompletion
from jaxpage.server.texts import check_length, check_messages


def router(server: Server) -> APIRouter:
    """Tokenizes and detokenizes."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeCompletion | TokenizeChat) -> dict[str, Any]:
        server.check_model(body.model)
        if isinstance(body, TokenizeChat):
            body = await server.with_media(body)
        return await server.with_inputs(lambda inputs: _tokenize(server, body, inputs))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        return await server.with_inputs(lambda inputs: _detokenize(body, inputs))

    return routes


def _tokenize(
    server: Server, body: TokenizeCompletion | TokenizeChat, inputs: InputProcessor
) -> dict[str, Any]:
    if isinstance(body, TokenizeCompletion):
        check_length(body.prompt, inputs)
        options = {"add_special_tokens": body.add_special_tokens}
        (prompt,) = inputs.parse(body.prompt, options)
    else:
        check_messages(body.messages, inputs)
        options = body.template_options(
            trust_template=server.options.trust_request_chat_template,
            defaults=server.options.default_chat_template_kwargs,
        )
        (prompt,) = inputs.parse_chat(body.messages, tools=body.tool_list, **options)
    ids = prompt.token_ids
    texts = inputs.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": inputs.limits.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }


def _detokenize(body: DetokenizeRequest, inputs: InputProcessor) -> dict[str, Any]:
    if inputs.tokenizer is None:
        raise ValueError("there is no tokenizer: the server was started with --skip-tokenizer-init")
    wrong = next((i for i in body.tokens if not 0 <= i < inputs.limits.vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"tokens has {wrong}, the vocabulary has ids 0..{inputs.limits.vocab_size - 1}"
        )
    return {"prompt": inputs.decode(body.tokens)}
