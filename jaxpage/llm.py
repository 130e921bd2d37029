"""`LLM`: prompts in, outputs out, in one process and one thread.

Knows how a request is made from a prompt, and how the engine is driven. Must not know blocks,
plans, the contents of steps, or devices: it hands `Request`s to the engine and reads them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from jaxpage.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    make_beams,
    read_output,
    request_params,
)
from jaxpage.config import EngineConfig
from jaxpage.outputs import RequestOutput, from_request
from jaxpage.prompts import Limits, Prompt, check, check_params, parse, parse_chat
from jaxpage.request import Request
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import bad_words_token_ids

if TYPE_CHECKING:
    from jaxpage.build import Built
    from jaxpage.engine.snapshot import KVSnapshot
    from jaxpage.runner.programs import ProgramRecord


class LLM:
    """An engine and its tokenizer. `options` are those of `EngineConfig`, under vLLM's names.

    `generate` and `chat` answer a batch; `add_request` and `step` drive the same engine step by
    step, and the two may be mixed. Not thread-safe. Ctrl-C takes effect between steps, never within
    one, and leaves the engine usable.
    """

    def __init__(self, model: str, **options: Any):
        """Raises ValueError or TypeError for options that cannot be had."""
        from jaxpage.build import build

        self._start(build(EngineConfig.from_options(model=model, **options)))

    @classmethod
    def from_built(cls, built: Built) -> LLM:
        """An LLM around an engine that was put together elsewhere."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _start(self, built: Built) -> None:
        self.config = built.config
        self._built = built
        self._engine = built.engine
        self._tokenizer = built.tokenizer
        self._limits = Limits(
            vocab_size=built.vocab_size,
            max_model_len=built.config.max_model_len,
            max_logprobs=built.config.max_logprobs,
            has_tokenizer=built.tokenizer is not None,
        )
        self._num_requests = 0  # ever added; names them, and seeds those that have no seed
        self._requests: dict[str, Request] = {}  # unfinished
        self._unreported: dict[str, Request] = {}  # moved on, and nobody was told yet

    # A batch at a time.

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt; results in the order of the prompts.

        A prompt is a str, a list of ids, or a dict with "prompt" or "prompt_token_ids" and
        optionally "cache_salt"; `prompts` is one or a list of them (a list of ids is one).
        `sampling_params` is one for all, one for each, or None for `get_default_sampling_params()`.
        Raises ValueError before anything runs if any prompt or its params cannot be served; on any
        exception later, the requests of this call are aborted.
        """
        requests = self._make_requests(parse(prompts, self._tokenizer), sampling_params, priority)
        return [from_request(request) for request in self._run(requests, use_tqdm)]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., tqdm] = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best answers to each prompt, as transformers' `generate(num_beams=)`.

        Prompts and errors are those of `generate`.
        """
        eos = frozenset(() if params.ignore_eos else self._built.eos_token_ids)
        row = request_params(params, eos, self._limits, self.config.logprobs_mode)
        requests = self._make_requests(parse(prompts, self._tokenizer), row, None)
        for request in requests:
            room = self._limits.max_model_len - len(request.prompt_token_ids)
            request.beams = make_beams(params, eos, room)
        ended = self._run(requests, use_tqdm)
        return [read_output(request, params, self._tokenizer) for request in ended]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; a conversation is a list of messages.

        `chat_template` is a file or a template, None the engine's, else the tokenizer's. Raises
        ValueError as `generate`, and if the template cannot render the messages.
        """
        prompts = parse_chat(
            messages,
            self._tokenizer,
            chat_template=chat_template or self.config.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        requests = self._make_requests(prompts, sampling_params, None)
        return [from_request(request) for request in self._run(requests, use_tqdm)]

    def _run(self, requests: list[Request], use_tqdm: bool | Callable[..., tqdm]) -> list[Request]:
        """Add requests, and step until they have ended; returns them."""
        running = {request.request_id for request in requests}
        with _progress(len(requests), use_tqdm) as progress:
            try:
                with _interrupts_deferred():
                    for request in requests:
                        self._add(request)
                while running:
                    self._step()
                    for request_id in running & self._unreported.keys():
                        request = self._unreported.pop(request_id)
                        if request.finished:
                            running.remove(request_id)
                            progress(request)
            except BaseException:
                self.abort_request(request.request_id for request in requests)
                raise
        return requests

    # A step at a time.

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Queue one prompt. Raises ValueError if it cannot be served or the id is in use."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a str, got {request_id!r}")
        if self._is_in_use(request_id):
            raise ValueError(f"request_id {request_id!r} is in use; choose another or abort it")
        prompts = parse(prompt, self._tokenizer)
        if len(prompts) != 1:
            raise ValueError(f"add_request takes one prompt, got {len(prompts)}")
        (request,) = self._make_requests(prompts, params, priority)
        request.request_id = request_id
        with _interrupts_deferred():
            self._add(request)

    def step(self) -> list[RequestOutput]:
        """Move on by one step: the outputs so far of requests that gained tokens or finished.

        What `add_request`'s requests gained during a `generate` call is reported here too.
        """
        if self._requests:
            self._step()
        reported, self._unreported = self._unreported, {}
        return [from_request(request) for request in reported.values()]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to return."""
        return bool(self._requests or self._unreported)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now; no output comes of them. Unknown and finished ids are ignored."""
        with _interrupts_deferred():
            for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
                if self._requests.pop(request_id, None) is not None:
                    self._engine.abort(request_id)
                self._unreported.pop(request_id, None)
            self._drain()

    # The rest.

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer. Raises ValueError with `skip_tokenizer_init`."""
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init=True")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config says, else vLLM's defaults."""
        return SamplingParams(**self._built.default_sampling)

    def stats(self) -> Any:
        """The engine's counters, a `jaxpage.engine.stats.EngineStats`."""
        return self._engine.stats()

    def programs(self) -> list[ProgramRecord]:
        """The compiled programs of this engine, and the names of those that are not compiled yet."""
        runner: Any = self._engine.runner
        return runner.programs.records()

    def kv_snapshot(self) -> KVSnapshot:
        """Who holds which KV block now, as arrays; `jaxpage.plots` draws them."""
        from jaxpage.engine.snapshot import take_snapshot

        return take_snapshot(self._engine.scheduler)

    def save_prefix_cache(self) -> None:
        """Write the prefix cache to `kv_offload_dir`, where a later process finds it; done at exit too.

        Without `kv_offload_dir` nothing happens.
        """
        self._engine.save_prefix_cache()

    def wait_until_warm(self) -> None:
        """Until every program is compiled; the first requests need not wait for all of them.

        Call it before measuring anything. Raises what the compiler raised.
        """
        self._engine.runner.wait_until_warm()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, and nothing happens, while requests are unfinished."""
        return self._engine.reset_prefix_cache()

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[Request]:
        """Checked, named and seeded, but not added: nothing has changed if this raises."""
        if params is None:
            params = self.get_default_sampling_params()
        all_params = _one_each("sampling_params", params, SamplingParams, len(prompts))
        priorities = _one_each("priority", priority or 0, int, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(
                    self._make_request(
                        prompt,
                        all_params[index],
                        number=self._num_requests + index,
                        priority=priorities[index],
                    )
                )
            except ValueError as e:
                raise ValueError(f"prompt {index} of {len(prompts)}: {e}") from None
        return requests

    def _make_request(
        self, prompt: Prompt, params: SamplingParams, *, number: int, priority: int
    ) -> Request:
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f'priority={priority} needs scheduling_policy="priority"')
        params = dataclasses.replace(params)  # the caller may go on to change the original
        bad_words = ()
        if params.bad_words:
            bad_words = bad_words_token_ids(self.get_tokenizer(), params.bad_words)
        check(prompt, self._limits)
        check_params(params, bad_words, self._limits)
        if params.max_tokens is None:
            params.max_tokens = self.config.max_model_len - len(prompt.token_ids)
        eos_token_ids = () if params.ignore_eos else self._built.eos_token_ids
        request_id = str(number)
        while self._is_in_use(request_id):
            request_id = f"_{request_id}"
        return Request(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=derive_seed(self.config.seed, number)
            if params.seed is None
            else params.seed % 2**32,
            stop_token_ids=frozenset((*eos_token_ids, *(params.stop_token_ids or ()))),
            eos_token_ids=frozenset(eos_token_ids[:1]),
            bad_words_token_ids=bad_words,
            priority=priority,
            cache_salt=prompt.cache_salt,
        )

    def _is_in_use(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._unreported

    def _add(self, request: Request) -> None:
        self._engine.add(request)
        self._requests[request.request_id] = request
        self._num_requests += 1

    def _step(self) -> None:
        """One step of the engine; the requests it moved on are unreported from here on."""
        with _interrupts_deferred():
            touched = []
            try:
                touched = self._engine.step()
            except BaseException:
                touched = [r for r in self._requests.values() if r.finished]  # it took them along
                raise
            finally:
                for request in touched:
                    if request.request_id in self._requests:
                        self._unreported[request.request_id] = request
                        if request.finished:
                            del self._requests[request.request_id]
            self._drain()

    def _drain(self) -> None:
        """Collect the step that an overlapped loop still has under way when nobody waits for it."""
        while self._engine.num_unfinished == 0 and self._engine.has_unfinished_requests():
            self._engine.step()


def derive_seed(engine_seed: int, number: int) -> int:
    """The uint32 seed of the `number`-th request of an engine, for a request that brings none."""
    digest = hashlib.blake2b(f"{engine_seed} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """`value` for each of `count` prompts, if it is not a list of as many already."""
    values = [value] * count if isinstance(value, kind) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{name} must be of type {kind.__name__}, or a list of it, got {value!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return list(values)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, so that it cannot tear a step in two."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # signals arrive in the main thread only
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


@contextlib.contextmanager
def _progress(
    num_requests: int, use_tqdm: bool | Callable[..., tqdm]
) -> Iterator[Callable[[Request], None]]:
    """A bar as vLLM's; call it with each finished request."""
    if not use_tqdm:
        yield lambda request: None
        return
    make_bar = use_tqdm if callable(use_tqdm) else tqdm
    speeds = "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s"
    num_input = num_output = 0
    with make_bar(
        total=num_requests,
        desc="Processed prompts",
        dynamic_ncols=True,
        postfix=speeds.format(0, 0),
    ) as bar:

        def update(request: Request) -> None:
            nonlocal num_input, num_output
            num_input += len(request.prompt_token_ids) * len(request.sequences)
            num_output += sum(sequence.num_output_tokens for sequence in request.sequences)
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.postfix = speeds.format(num_input / elapsed, num_output / elapsed)
            bar.update(1)

        yield update
        bar.refresh()
