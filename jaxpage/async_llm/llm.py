"""`AsyncLLM`: one engine for many tasks and threads.

Input processing, the engine's steps and output processing each run in their own thread, so tokenising, grammars and
detokenising never delay the device. Knows how the three are connected. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpage.async_llm.control import EngineControl
from jaxpage.async_llm.output_loop import Observer
from jaxpage.async_llm.pooling import AsyncPoolingCalls, PoolingTasks
from jaxpage.async_llm.streams import Stream
from jaxpage.async_llm.tasks import Prepare, Tasks
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.input_processor import InputProcessor
from jaxpage.lora.request import LoRARequest
from jaxpage.outputs import RequestOutput
from jaxpage.pictures.messages import has_media
from jaxpage.prompts import Prompt
from jaxpage.request import Request
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.vllm_calls import VllmNames

if TYPE_CHECKING:
    from jaxpage.build import Built
    from jaxpage.engine.scheduler import Scheduler
    from jaxpage.engine.snapshot import KVSnapshot
    from jaxpage.engine.stats import EngineStats
    from jaxpage.runner.programs import ProgramRecord

T = TypeVar("T")


class AsyncLLM(EngineControl, AsyncPoolingCalls, VllmNames):
    """An engine for many callers at once. `options` are those of `EngineConfig`, as for `LLM`.

    `generate` is for tasks of any event loop, including a notebook's, and `submit` for threads without one; `encode` is
    for pooling models. All methods may be called from any thread. The constructor returns once the first request can
    run, which may take a while.
    """

    def __init__(self, model: str, **options: Any):
        """Raises ValueError or TypeError for invalid or unsupported options. For `nnodes` see `LLM`."""
        self._build(EngineConfig.from_options(model=model, **options))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> AsyncLLM:
        """An AsyncLLM with the options of an `EngineArgs`.

        `usage_context` has no effect: nobody is told about usage. Raises ValueError for `start_engine_loop=False` and
        for `stat_loggers`.
        """
        if not start_engine_loop:
            raise ValueError("start_engine_loop=False is not supported: the engine starts at once")
        if stat_loggers:
            raise ValueError("stat_loggers are not supported: call stats(), or observe(observer)")
        llm = cls.__new__(cls)
        llm._build(engine_args)
        return llm

    @classmethod
    def from_built(cls, built: Built) -> AsyncLLM:
        """An AsyncLLM around an engine that was built elsewhere."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _build(self, options: EngineConfig) -> None:
        from jaxpage.build import build
        from jaxpage.pooling.choose import pools

        if pools(options):
            self._start_pooling(options)
        else:
            self._start(build(options))

    def _start_pooling(self, options: EngineConfig) -> None:
        from jaxpage.pooling.async_pooler import AsyncPooler
        from jaxpage.pooling.build import build_pooler

        built = build_pooler(options)
        self.config, self._pooler = built.config, AsyncPooler.from_built(built)
        tasks: Any = PoolingTasks(self._pooler, built)
        self._tasks = self._memory = tasks
        self._finalizer = weakref.finalize(self, self._pooler.shutdown)

    def _start(self, built: Built) -> None:
        self.config: ResolvedConfig = built.config
        self._tasks, self._memory = Tasks(built), built.memory
        # The threads refer to the tasks, not to this object, so it can be collected while they run.
        self._finalizer = weakref.finalize(self, Tasks.shut_down, self._tasks)

    # Requests.

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: `async for output in llm.generate(...)`.

        `sampling_params.output_kind` determines what an output contains; outputs that arrive faster than they are
        consumed are merged. If the consumer stops or is cancelled, the request is aborted. `trace_headers` are for
        observers: the caller's W3C trace context, "traceparent" and "tracestate". `data_parallel_rank` is the number
        of the replica that shall answer (if it fails before the first output, another may).

        Prompts are those of `LLM.generate`. Raises ValueError if this one cannot be served, StepFailedError if a step
        of this request failed, EngineDeadError if the engine is dead or was shut down.
        """
        stream = await self.start(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        with contextlib.closing(stream):
            async for output in stream:
                yield output

    async def start(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> Stream:
        """As `generate`, but raises its ValueErrors immediately, and returns once the engine has the request.

        The stream must be read to its end, or closed.
        """
        prepare = functools.partial(
            _prepare,
            prompt=prompt,
            params=sampling_params,
            request_id=request_id,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        num_replicas = self.config.data_parallel_size
        if data_parallel_rank not in (None, *range(num_replicas)):
            raise ValueError(
                f"data_parallel_rank must be None or one of 0 to {num_replicas - 1}, got {data_parallel_rank!r}"
            )

        def pinned(inputs: InputProcessor) -> list[Request]:
            request = prepare(inputs)
            request.replica = data_parallel_rank
            return [request]

        (stream,) = await self._begin(pinned, 1)
        return stream

    async def start_all(
        self,
        read: Callable[[InputProcessor], tuple[Sequence[Prompt], SamplingParams]],
        request_ids: Sequence[str],
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> list[Stream]:
        """As `start` for the prompts that `read` returns, one for each id: either all are answered or none.

        `read` is called in the thread of the input processor, from which its prompts go directly to the engine.
        """

        def prepare(inputs: InputProcessor) -> list[Request]:
            prompts, params = read(inputs)
            return [
                _prepare(
                    inputs,
                    prompt=prompt,
                    params=params,
                    request_id=request_id,
                    lora_request=lora_request,
                    trace_headers=trace_headers,
                    priority=priority,
                )
                for prompt, request_id in zip(prompts, request_ids, strict=True)
            ]

        return await self._begin(prepare, len(request_ids))

    async def _begin(self, prepare: Prepare, num_requests: int) -> list[Stream]:
        """The requests' streams, once the engine has the requests."""
        streams = [Stream() for _ in range(num_requests)]
        try:
            for added in await asyncio.wrap_future(self._tasks.start(prepare, streams)):
                await asyncio.wrap_future(added)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = "auto",
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation. The completions of the last output have `content`, `reasoning` and `tool_calls`.

        `template_options` are those of `LLM.chat`, from `chat_template` to `chat_template_kwargs`.
        """

        def render(inputs: InputProcessor) -> tuple[Prompt, SamplingParams, Any]:
            template_tools = None if tool_choice == "none" else tools
            prompts = inputs.parse_chat(messages, tools=template_tools, **template_options)
            if len(prompts) != 1:
                raise ValueError(f"AsyncLLM.chat takes one conversation, got {len(prompts)}")
            chat_format = inputs.chat_format(template_options.get("chat_template"))
            params = sampling_params or inputs.default_params()
            return prompts[0], chat_format.params(params, tools, tool_choice), chat_format

        messages = await self.load_media(messages)
        prompt, params, chat_format = await self.with_inputs(render)
        outputs = self.generate(
            prompt, params, request_id, lora_request=lora_request, priority=priority
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.finished and params.output_kind is not RequestOutputKind.DELTA:
                    chat_format.read(output, tools, tool_choice)
                yield output

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> Future[RequestOutput]:
        """Answer one prompt, for threads: a future of the final output. Cancelling it aborts the request.

        `result` raises what `generate` raises.
        """
        params = sampling_params and dataclasses.replace(
            sampling_params, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prepare = functools.partial(
            _prepare, prompt=prompt, params=params, lora_request=lora_request, priority=priority
        )
        (future,) = self._tasks.submit(lambda inputs: [prepare(inputs)], 1)
        return future

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; their last outputs have the finish reason "abort". Unknown and finished ids are ignored."""
        self._tasks.abort([request_id] if isinstance(request_id, str) else list(request_id))

    async def load_media(self, messages: Sequence[Any]) -> Sequence[Any]:
        """A conversation with its pictures loaded and preprocessed, in a separate thread, since URLs may be slow.

        A conversation without pictures, or for a model that takes none, is returned unchanged. Raises ValueError.
        """
        reader = self._tasks.inputs.pictures
        if reader is None or not has_media(messages):
            return messages
        return await asyncio.to_thread(reader.load, messages)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`. Read in the thread of the input processor, while steps continue."""
        return await self.with_inputs(lambda inputs: inputs.adapters.add(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await self.with_inputs(lambda inputs: inputs.adapters.remove(lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return await self.with_inputs(lambda inputs: inputs.adapters.ids)

    async def with_inputs(self, function: Callable[[InputProcessor], T]) -> T:
        """Call a function in the thread of the input processor, where slow tokenising and rendering belong."""
        return await asyncio.wrap_future(self._tasks.with_inputs(function))

    # The engine; see also `EngineControl`.

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of every step and every request from now on."""
        self._tasks.outputs.post(lambda: self._tasks.outputs.observers.append(observer))

    def stats(self) -> EngineStats:
        """The engine's current counters; with replicas their sum, and those of each."""
        return self._tasks.engine.stats()

    def programs(self) -> list[ProgramRecord]:
        """The compiled programs of this engine, and the names of those that are not compiled yet."""
        return self._tasks.engine.programs()

    async def with_schedulers(
        self, function: Callable[[Scheduler], T], replica: int | None = None
    ) -> dict[int, T]:
        """Call a function with the scheduler of each live replica, or of one, between two of its steps.

        Returns the results by replica number. The function must only read, and be quick: it delays the next step.
        """
        engine = self._tasks.engine
        found = await self._call(lambda: engine.with_schedulers(function, replica))
        return {number: await asyncio.wrap_future(f) for number, f in found.items()}

    async def kv_snapshot(self, replica: int = 0) -> KVSnapshot:
        """Who holds which KV block of one replica now, as arrays; `jaxpage.plots` draws them.

        Takes 30 ms for 100,000 blocks, during which no step is launched. Raises ValueError if there is no such replica.
        """
        from jaxpage.engine.snapshot import of_replica, take_snapshot

        return of_replica(replica, await self.with_schedulers(take_snapshot, replica))

    @property
    def model_config(self) -> ResolvedConfig:
        """vLLM's name for the model's options; here all options."""
        return self.config

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        if self._tasks.inputs.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init=True")
        return self._tasks.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation config, or else vLLM's."""
        return self._tasks.inputs.default_params()

    def shutdown(self) -> None:
        """Stop the engine; unfinished requests get an EngineDeadError. Also called at exit."""
        self._finalizer()


def _prepare(
    inputs: InputProcessor,
    *,
    prompt: Any,
    params: SamplingParams | None,
    request_id: str | None = None,
    lora_request: LoRARequest | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    trace_headers: Mapping[str, str] | None = None,
    priority: int = 0,
) -> Request:
    prompts = [prompt] if isinstance(prompt, Prompt) else inputs.parse(prompt, tokenization_kwargs)
    params, request_id = params or inputs.default_params(), request_id or uuid.uuid4().hex
    request = inputs.request(request_id, prompts, params, priority, lora_request)
    request.trace_headers = trace_headers
    return request
