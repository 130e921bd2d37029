"""What every handler needs: the engine, the options, and the running calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxpage.async_llm import AsyncLLM
from jaxpage.input_processor import InputProcessor
from jaxpage.lora.request import LoRARequest
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.adapters import ServedAdapters
from jaxpage.server.batch import Asked, Batch, Caller, InFlight
from jaxpage.server.errors import ApiError
from jaxpage.server.metrics import Metrics
from jaxpage.server.options import ServerOptions
from jaxpage.server.protocol.chat import TemplateFields
from jaxpage.server.protocol.sampling import StreamOptions
from jaxpage.server.response_store import ResponseStore
from jaxpage.server.usage import Usage

# Fields of vLLM's whole answers that have no value here; clients read them as attributes.
_NULL_FIELDS = (
    "service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics",
)  # fmt: skip

T = TypeVar("T")
A = TypeVar("A", bound=Asked)
B = TypeVar("B", bound=TemplateFields)


@dataclass(kw_only=True)
class Server:
    """One engine with the options of its server. Belongs to one event loop."""

    llm: AsyncLLM
    options: ServerOptions
    in_flight: InFlight
    responses: ResponseStore
    model_names: tuple[str, ...]
    metrics: Metrics
    adapters: ServedAdapters
    is_warm: bool = False  # every program is compiled
    engine_hangs: bool = False  # it was told to stop, and did not in time
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    @classmethod
    def of(cls, llm: AsyncLLM, options: ServerOptions) -> Server:
        """A server for this engine."""
        config = llm.config
        num_running = config.data_parallel_size * config.max_num_seqs
        limit = num_running + options.max_queued_requests
        names = model_names(options, config.model)
        metrics = Metrics(llm, names[0])
        llm.observe(metrics)
        return cls(
            llm=llm,
            options=options,
            in_flight=InFlight(max_requests=limit, rejected=metrics.rejected),
            responses=ResponseStore(options.max_stored_responses),
            model_names=names,
            metrics=metrics,
            adapters=ServedAdapters(llm, options.lora_modules, names),
        )

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.model_names[0]

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered at full speed."""
        return self.is_warm and not self.in_flight.is_draining and not self.llm.errored

    def check_model(self, model: str | None) -> LoRARequest | None:
        """The adapter with that name; None for the model itself. Raises ApiError 404 for unknown names."""
        adapter = self.adapters.get(model)
        if model is not None and adapter is None and model not in self.model_names:
            names = ", ".join(map(repr, (*self.model_names, *self.adapters.names)))
            raise ApiError(
                404, f"the model {model!r} is not served here; there is {names}", param="model"
            )
        return adapter

    def name_of(self, adapter: LoRARequest | None) -> str:
        """The model name for answers."""
        return self.model_name if adapter is None else adapter.lora_name

    def check_size(self, num_prompts: int, params: SamplingParams) -> None:
        """Raise ValueError for a call that is too large."""
        total, limit = num_prompts * params.n, self.options.max_n
        if total > limit:
            raise ValueError(
                f"n={params.n} with {num_prompts} prompts are {total} continuations, the limit is {limit} (--max-n); "
                "send several requests"
            )
        num_stops = len(params.stop or ())
        if num_stops > self.options.max_stop_strings:
            raise ValueError(
                f"stop has {num_stops} strings, the limit is {self.options.max_stop_strings}"
            )

    async def with_media(self, body: B) -> B:
        """The body with the pictures in its messages loaded. Raises ValueError."""
        return body.model_copy(update={"messages": await self.llm.load_media(body.messages)})

    async def seen(self, messages: list[dict[str, Any]], field: str) -> Sequence[Any]:
        """Chat messages that were made of `field`, with their pictures loaded. Raises ApiError."""
        try:
            return await self.llm.load_media(messages)
        except ValueError as error:
            message = f"{field}, as messages of a chat: {error}"
            raise ApiError(400, message, param=field) from None

    async def with_inputs(self, function: Callable[[InputProcessor], T]) -> T:
        """Run a function that needs the tokenizer, in the tokenizer's thread."""
        return await self.llm.with_inputs(function)

    async def start(
        self,
        caller: Caller,
        read: Callable[[InputProcessor], A],
        *,
        num_prompts: int = 1,
        priority: int = 0,
        adapter: LoRARequest | None = None,
    ) -> tuple[Batch, A]:
        """Start `num_prompts` prompts; `read` creates them in the tokenizer's thread.

        Raises ValueError, ApiError or EngineDeadError.
        """
        self.check_size(num_prompts, SamplingParams())  # before ids and streams are made for them
        found: list[A] = []

        def read_checked(inputs: InputProcessor) -> A:
            asked = read(inputs)
            self.check_size(num_prompts, asked.params)
            found.append(asked)
            return asked

        batch = await Batch.start(
            self.llm, self.in_flight, caller, read_checked, num_prompts, priority, adapter
        )
        return batch, found[0]

    def wanted_usage(self, options: StreamOptions | None) -> tuple[bool, bool]:
        """Whether a stream ends with its usage, and whether every chunk has that of its choice."""
        if self.options.enable_force_include_usage:
            return True, True
        if options is None or not options.include_usage:
            return False, False
        return True, bool(options.continuous_usage_stats)

    def usage(self) -> Usage:
        return Usage(with_details=self.options.enable_prompt_tokens_details)


def model_names(options: ServerOptions, model: str) -> tuple[str, ...]:
    """Those that requests may use for the model; the first one is that of answers."""
    folder = Path(model)
    name = folder.name if folder.is_dir() else model
    return options.served_model_name or tuple(dict.fromkeys((name, model)))


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields common to all chunks of an answer."""

    id: str
    object: str
    created: int
    model: str

    def body(self, **rest: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            **rest,
        }

    def whole_body(self, **rest: Any) -> dict[str, Any]:
        """A whole answer, with the fields that vLLM has as null."""
        return self.body(**{**dict.fromkeys(_NULL_FIELDS), **rest})
