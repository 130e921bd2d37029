"""`POST /v1/completions`: continuations of texts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.prompts import Prompt
from jaxpage.server.batch import Asked, Batch, Caller
from jaxpage.server.context import Head, Server
from jaxpage.server.logprobs import completion_logprobs, prompt_logprobs
from jaxpage.server.protocol.completions import CompletionRequest
from jaxpage.server.protocol.sampling import check_max_tokens
from jaxpage.server.texts import check_length
from jaxpage.server.usage import Usage

# Null in choices that have nothing else there, as in vLLM.
_NULL_FIELDS = ("token_ids", "prompt_token_ids")
_NULL_FIELDS_OF_WHOLE = ("prompt_logprobs", "routed_experts")


@dataclass(frozen=True, kw_only=True)
class _Echo:
    """What an echo needs to know of a prompt."""

    first_text: str | None = None  # of its first token, None without a tokenizer
    num_added: int = 0  # tokens before its text, such as BOS


@dataclass(frozen=True, kw_only=True)
class _Asked(Asked):
    echoes: list[_Echo]  # of each prompt


class CompletionCall:
    """A running call. It must be closed."""

    @classmethod
    async def start(cls, server: Server, body: CompletionRequest, caller: Caller) -> CompletionCall:
        """Raises ValueError, ApiError or EngineDeadError before anything is computed."""
        body.warn_of_unknown()
        adapter = server.check_model(body.model)

        given = body.prompts()

        def read(inputs: InputProcessor) -> _Asked:
            params = body.params(inputs.default_options)
            check_max_tokens("max_tokens", body.max_tokens, inputs.limits.max_model_len)
            server.check_size(len(given), params)
            for prompt in given if body.truncate_prompt_tokens is None else ():
                check_length(prompt, inputs)
            options = {"add_special_tokens": body.add_special_tokens} | body.truncation()
            prompts = inputs.parse(given, options)
            for prompt in prompts:
                prompt.cache_salt = body.cache_salt
            echoes = [_echo(prompt, body, inputs) if body.echo else _Echo() for prompt in prompts]
            return _Asked(prompts=prompts, params=params, echoes=echoes)

        batch, asked = await server.start(
            caller, read, num_prompts=len(given), priority=body.priority, adapter=adapter
        )
        head = Head(
            id=f"cmpl-{caller.id}",
            object="text_completion",
            created=int(time.time()),
            model=server.name_of(adapter),
        )
        return cls(server, body, head, batch, asked.params.n, asked.echoes)

    def __init__(
        self,
        server: Server,
        body: CompletionRequest,
        head: Head,
        batch: Batch,
        n: int,
        echoes: list[_Echo],
    ):
        """`n`: choices per prompt; `echoes`: of each prompt."""
        self.batch = batch
        self._server = server
        self._body = body
        self._head = head
        self._n = n
        self._echoes = echoes
        self._written: dict[int, _Written] = {}  # by choice, while streaming

    def close(self) -> None:
        """See `Call`."""
        self.batch.close()

    async def response(self) -> dict[str, Any]:
        """The complete answer."""
        outputs = await self.batch.last_outputs()
        usage = self._server.usage()
        choices = []
        for index, output in enumerate(outputs):
            for completion in output.outputs:
                choices.append(self._choice(index, output, completion, is_whole=True))
            self._count(usage, index, output)
        return self._head.whole_body(choices=choices, usage=usage.whole_body())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        usage = self._server.usage()
        with_usage, always = self._server.wanted_usage(self._body.stream_options)
        async for index, output in self.batch.outputs():
            self._count(usage, index, output)
            for completion in output.outputs:
                chunk = self._head.body(choices=[self._choice(index, output, completion)])
                if always:
                    chunk["usage"] = usage.chunk_body(index, completion.index)
                yield chunk
        if with_usage:
            yield self._head.body(choices=[], usage=usage.body())

    def _count(self, usage: Usage, index: int, output: RequestOutput) -> None:
        (usage.add_prompt if self._body.only_scores else usage.add)(index, output)

    def _choice(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        is_whole: bool = False,
    ) -> dict[str, Any]:
        """A complete choice, or its new part."""
        body, number = self._body, index * self._n + completion.index
        written = self._written.setdefault(number, _Written())
        is_first, written.is_begun = not written.is_begun, True
        text, token_ids = completion.text, list(completion.token_ids)
        if body.only_scores:
            text, token_ids = "", []
        echoed = list(output.prompt_token_ids) if body.echo and is_first else []
        if echoed:
            text = (output.prompt or "") + text
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(index, output, completion, echoed, token_ids),
            "finish_reason": _finish_reason(completion, only_scores=body.only_scores),
            "stop_reason": completion.stop_reason,
            **dict.fromkeys(_NULL_FIELDS),
        }
        if is_whole:
            choice |= dict.fromkeys(_NULL_FIELDS_OF_WHOLE)
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = list(output.prompt_token_ids) if is_first else None
        return choice

    def _logprobs(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        echoed: list[int],
        token_ids: list[int],
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        written = self._written[index * self._n + completion.index]
        echo = self._echoes[index]
        num_added = min(echo.num_added, len(echoed))
        entries: list[Any] = list(completion.logprobs or ())[: len(token_ids)]
        if echoed:
            entries = [*(output.prompt_logprobs or ()), *entries]
        logprobs = completion_logprobs(
            [*echoed, *token_ids],
            entries,
            as_ids=bool(self._body.return_tokens_as_token_ids),
            offset=written.num_chars,
            unscored=echo.first_text,
            num_added=num_added,
        )
        written.num_chars += sum(map(len, logprobs["tokens"][num_added:]))
        return logprobs


def _echo(prompt: Prompt, body: CompletionRequest, inputs: InputProcessor) -> _Echo:
    """Make the prompt's text the one to echo: what was kept of it, without the tokens that the tokenizer added."""
    first_text = inputs.decode(prompt.token_ids[:1])
    if prompt.text is None or first_text is None:
        prompt.text = inputs.decode(prompt.token_ids)
        return _Echo(first_text=first_text)
    kept, num_added = _without_added(prompt, body, inputs)
    length = body.truncate_prompt_tokens
    longest = inputs.limits.max_model_len - 1 if length == -1 else length
    may_be_cut = longest is not None and len(prompt.token_ids) >= longest
    if may_be_cut and not kept.endswith(prompt.text):
        prompt.text = kept
    return _Echo(first_text=first_text, num_added=num_added)


def _without_added(
    prompt: Prompt, body: CompletionRequest, inputs: InputProcessor
) -> tuple[str, int]:
    """The text of the prompt's tokens, without those that the tokenizer added before it, and how many these are."""
    tokenizer, given = inputs.tokenizer, prompt.text or ""
    most = tokenizer.num_special_tokens_to_add() if body.add_special_tokens else 0
    special, num_added = set(tokenizer.all_special_ids), 0
    kept = tokenizer.decode(prompt.token_ids)
    # A text may begin with special tokens of its own.
    while kept not in given and num_added < most and prompt.token_ids[num_added] in special:
        num_added += 1
        kept = tokenizer.decode(prompt.token_ids[num_added:])
    return kept, num_added


@dataclass
class _Written:
    """How much of a choice was sent."""

    is_begun: bool = False
    num_chars: int = field(default=0)  # of its tokens


def _finish_reason(completion: CompletionOutput, *, only_scores: bool) -> str | None:
    return "length" if only_scores and completion.finish_reason else completion.finish_reason
