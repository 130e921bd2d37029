"""`LLM`: prompts in, outputs out, in one process and one thread.

Knows how input processor, engine and output processor fit together. Must not know blocks, plans, the contents of
steps, or devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpage.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    make_beams,
    read_output,
    request_params,
)
from jaxpage.call_guard import OneCaller, interrupts_deferred
from jaxpage.config import EngineConfig
from jaxpage.input_processor import AnyLoRA, InputProcessor
from jaxpage.lora.request import LoRARequest
from jaxpage.memory_calls import MemoryCalls
from jaxpage.output_processor import OutputProcessor, make_detokenizer
from jaxpage.outputs import RequestOutput
from jaxpage.pooling.calls import PoolingCalls
from jaxpage.profiling import ProfilingCalls
from jaxpage.progress_bar import UseTqdm, progress_bar
from jaxpage.request import Request
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.vllm_calls import VllmCalls
from jaxpage.vllm_options import refuse

if TYPE_CHECKING:
    from jaxpage.build import Built
    from jaxpage.engine.snapshot import KVSnapshot
    from jaxpage.engine.step_output import StepOutput
    from jaxpage.engine.verbs import EngineVerbs
    from jaxpage.runner.programs import ProgramRecord


class LLM(PoolingCalls, MemoryCalls, ProfilingCalls, VllmCalls):
    """An engine and its tokenizer. `options` are those of `EngineConfig`, under vLLM's names.

    `generate` and `chat` answer a batch; `add_request` and `step` drive the same engine one step at a time, and the two
    may be mixed. Only one thread at a time may call it, in the process that created it; other calls raise
    RuntimeError. Ctrl-C takes effect between steps, never within one, and leaves the engine usable.
    """

    def __init__(self, model: str, **options: Any):
        """Raises ValueError or TypeError for options that are not supported.

        With `nnodes` it returns on host 0 only. On the other hosts it executes what host 0 sends, and raises
        SystemExit(0) when host 0 has ended.
        """
        self._build(EngineConfig.from_options(model=model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """An LLM with the options of an `EngineArgs`."""
        llm = cls.__new__(cls)
        llm._build(engine_args)
        return llm

    @classmethod
    def from_built(cls, built: Built) -> LLM:
        """An LLM around an engine that was built elsewhere."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _build(self, config: EngineConfig) -> None:
        from jaxpage.build import build
        from jaxpage.pooling.choose import pools

        if pools(config):
            self._start_pooling(config)
        else:
            self._start(build(config))

    def _start(self, built: Built) -> None:
        self.config = built.config
        self._engine: EngineVerbs = built.engine
        detokenizers = functools.partial(make_detokenizer, built.tokenizer)
        self._outputs = OutputProcessor(detokenizers, built.config.stream_interval)
        self._inputs = InputProcessor(built, ids_in_use=self._outputs)
        self._caller, self._memory = OneCaller(), built.memory

    # A batch at a time.

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: AnyLoRA = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt. Returns final outputs, whatever `output_kind` is, in the order of the prompts.

        A prompt is a str, a list of ids, or a dict with "prompt", "prompt_token_ids" or "prompt_embeds" (an array
        [T, E], with `enable_prompt_embeds`), optionally with "cache_salt" and, for models that take pictures,
        "multi_modal_data" (`inputs.MultiModalData`). `prompts` is one prompt or a list of them (a list of ids is one).
        `sampling_params` is one for all, one for each, or None for `get_default_sampling_params()`.
        `tokenization_kwargs`: see `tokenization.py`. `lora_request` is one adapter for all, or a list with one or None
        for each. Raises ValueError before anything runs if any prompt or its params cannot be served; on any
        later exception, the requests of this call are aborted.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        with self._caller:
            parsed = self._inputs.parse(prompts, tokenization_kwargs)
            requests = self._inputs.requests(
                parsed, sampling_params, priority, lora_request=lora_request
            )
            return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: AnyLoRA = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tool_choice: Any = "auto",
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; a conversation is a list of messages.

        For models that take pictures, parts of a message's content may be `image_url`, `image_pil`, `image` or `video`.
        Completions have `content`, `reasoning` and `tool_calls` besides their text. `tool_choice`: "auto", "none" (the
        model is not told about `tools`), "required" (the answer must be tool calls), or {"type": "function",
        "function": {"name": ...}} to call that tool. With the last two, arguments always match the tool's parameters.

        `chat_template` is a file or a template; None: the engine's, or else the tokenizer's. A content that is a list
        of parts goes to the template as it is ("openai"), as one string ("string"), or as the template seems to expect
        ("auto"). Raises ValueError like `generate`, and if the template cannot render the messages.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        with self._caller:
            chat = self._inputs.chat_format(chat_template)
            parsed = self._inputs.parse_chat(
                messages,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tool_choice == "none" else tools,
                chat_template_kwargs=chat_template_kwargs,
                tokenization_kwargs=tokenization_kwargs,
            )
            requests = self._inputs.requests(
                parsed,
                sampling_params,
                priority,
                lambda p: chat.params(p, tools, tool_choice),
                lora_request=lora_request,
            )
            outputs = self._run(requests, use_tqdm)
        for output in outputs:
            chat.read(output, tools, tool_choice)
        return outputs

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: AnyLoRA = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best answers to each prompt, as transformers' `generate(num_beams=)` finds them.

        At most `concurrency_limit` prompts run at a time. Prompts and errors are those of `generate`.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(
                f"concurrency_limit must be None or at least 1, got {concurrency_limit}"
            )
        inputs, limits = self._inputs, self._inputs.limits
        eos = frozenset(() if params.ignore_eos else inputs.eos_token_ids)
        row = request_params(params, eos, limits, self.config.logprobs_mode)
        with self._caller:
            requests = inputs.requests(inputs.parse(prompts), row, lora_request=lora_request)
            for request in requests:
                room = limits.max_model_len - len(request.prompt_token_ids)
                request.beams = make_beams(params, eos, room)
            self._run(requests, use_tqdm, concurrency_limit)
        return [read_output(request, params, inputs.tokenizer) for request in requests]

    def _run(
        self, requests: list[Request], use_tqdm: UseTqdm, limit: int | None = None
    ) -> list[RequestOutput]:
        """Add requests, at most `limit` at a time, and step until all have ended."""
        waiting = requests[::-1]
        outputs: dict[str, RequestOutput | None] = dict.fromkeys(r.request_id for r in requests)
        num_running = 0
        with progress_bar(len(requests), use_tqdm) as progress:
            try:
                while waiting or num_running:
                    with interrupts_deferred():
                        while waiting and (limit is None or num_running < limit):
                            request = waiting.pop()
                            request.params.output_kind = RequestOutputKind.FINAL_ONLY
                            self._add(request)
                            num_running += 1
                    for request_id in self._take(self._engine.step):
                        if request_id in outputs:
                            output = outputs[request_id] = self._outputs.take_one(request_id)
                            num_running -= 1
                            progress(output)
            except BaseException:
                self.abort_request(outputs)
                raise
        return [output for output in outputs.values() if output is not None]

    # A step at a time.

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: None = None,
        priority: int = 0,
        *,
        prompt_text: str | None = None,
    ) -> str:
        """Queue one prompt; returns its id. Raises ValueError if it cannot be served or the id is in use.

        `arrival_time`, in seconds since the epoch, is for `metrics`. `prompt_text` has no effect, as in vLLM.
        """
        refuse(trace_headers=trace_headers)
        with self._caller:
            prompts = self._inputs.parse(prompt, tokenization_kwargs)
            request = self._inputs.request(request_id, prompts, params, priority, lora_request)
            if arrival_time is not None:
                request.queued_time -= request.arrival_time - arrival_time
                request.arrival_time = arrival_time
            with interrupts_deferred():
                self._add(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns outputs, as their `output_kind` says, of requests that gained tokens or finished.

        This includes what requests of `add_request` gained during a `generate` call. If the tokenizer fails for a
        request, raises its error and ends that request; the next call returns the outputs of the others.
        """
        with self._caller:
            if self._outputs.num_unfinished:
                self._check_awake()
                self._take(self._engine.step)
            return self._outputs.take(self.abort_request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to return."""
        return bool(self._outputs.num_unfinished or self._outputs.num_unreported)

    def get_num_unfinished_requests(self) -> int:
        return self._outputs.num_unfinished

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now, without an output. Unknown and finished ids are ignored."""
        with self._caller, interrupts_deferred():
            for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
                if self._outputs.discard(request_id):
                    self._engine.abort(request_id)
            self._drain()

    def _add(self, request: Request) -> None:
        self._check_awake()
        self._outputs.add(request)
        try:
            self._engine.add(request)
        except Exception:
            self._outputs.discard(request.request_id)
            raise

    def _take(self, move_on: Callable[[], StepOutput]) -> list[str]:
        """Run and process one step of the engine. Returns the ids of the requests that finished."""
        with interrupts_deferred():
            try:
                step = move_on()
            except BaseException:
                self._outputs.abort(self._engine.take_failed())
                raise
            processed = self._outputs.process(step)
            for text_end in processed.text_ends:
                self._engine.end_by_text(text_end)
            for request_id in (*processed.errors, *processed.unwanted):
                self._engine.abort(request_id)
            self._drain()
        if processed.errors:
            raise next(iter(processed.errors.values()))
        return processed.finished

    def _drain(self) -> None:
        """Collect the step that is still in flight in the overlapped loop when no request is left."""
        while self._engine.num_unfinished == 0 and self._engine.has_unfinished_requests():
            self._engine.step()

    # Adapters. Without `enable_lora` these raise ValueError.

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, unless it is loaded. Always True. Raises ValueError if it cannot be applied."""
        with self._caller:
            return self._inputs.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; requests that use it keep it until they end. False if there is none with that id."""
        with self._caller:
            return self._inputs.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The ids of the adapters in host memory."""
        return self._inputs.adapters.ids

    # The rest.

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        if self._inputs.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init=True")
        return self._inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config says, else vLLM's defaults."""
        return self._inputs.default_params()

    def stats(self) -> Any:
        """The engine's counters, a `jaxpage.engine.stats.EngineStats`; with replicas the sum, and each part.

        Those of a pooling model are a `jaxpage.pooling.engine.PoolingStats`.
        """
        return self._engine.stats()

    def programs(self) -> list[ProgramRecord]:
        """The compiled programs of this engine, and the names of those that are not compiled yet."""
        return self._engine.programs()

    def kv_snapshot(self, replica: int = 0) -> KVSnapshot:
        """Who holds which KV block of one replica now, as arrays; `jaxpage.plots` draws them.

        Raises ValueError if there is no such replica.
        """
        from jaxpage.engine.snapshot import of_replica, take_snapshot

        with self._caller:
            found = self._engine.with_schedulers(take_snapshot, replica)
            return of_replica(replica, {number: f.result() for number, f in found.items()})

    def save_prefix_cache(self) -> None:
        """Write the prefix cache to `kv_offload_dir`, where a later process finds it; also done at exit.

        Without `kv_offload_dir` nothing happens.
        """
        with self._caller:
            self._engine.save_prefix_cache()

    def wait_until_warm(self) -> None:
        """Wait until every program is compiled; the first requests do not need all of them.

        Call it before measuring anything. Raises what the compiler raised.
        """
        self._caller.check_process()
        self._engine.wait_until_warm()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached KV. False, and nothing happens, while requests hold blocks.

        With `reset_running_requests` they first release their blocks, and their KV is recomputed. `reset_connector` has
        no effect: there is no connector.
        """
        with self._caller:
            return self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests)


LLMEngine = LLM  # vLLM has a separate class for its engine, see `LLM.llm_engine`
