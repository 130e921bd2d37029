"""What an `AsyncLLM` does with a pooling model: `encode`, and refusals of everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpage.engine.errors import EngineDeadError
from jaxpage.pooling.calls import DoesNotGenerate

if TYPE_CHECKING:
    from jaxpage.pooling.async_pooler import AsyncPooler
    from jaxpage.pooling.build import BuiltPooler
    from jaxpage.pooling.outputs import PoolingRequestOutput
    from jaxpage.pooling.params import PoolingParams

T = TypeVar("T")


class AsyncPoolingCalls:
    """The method of pooling models, under vLLM's name. With a model that generates text it raises ValueError."""

    _pooler: AsyncPooler | None = None

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yields the output of one prompt once: `async for output in llm.encode(...)`. See `LLM.encode`.

        `pooling_params.task`: None for the model's own task. Waiting calls are computed together. A consumer that is
        cancelled before its prompt is computed costs nothing. Raises ValueError if the prompt cannot be answered,
        EngineDeadError if the engine was shut down.
        """
        pooler = self._pooler
        if pooler is None:
            raise ValueError(
                "this model generates text and cannot encode; "
                'AsyncLLM(model, runner="pooling") makes embeddings with it'
            )
        if lora_request:
            raise ValueError(f"lora_request={lora_request!r} is not supported; leave it None")
        work = await pooler.read(
            lambda pooler: pooler.encode(prompt, pooling_params, None, tokenization_kwargs)
        )
        if len(work.texts) != 1:
            raise ValueError(f"AsyncLLM.encode takes one prompt, got {len(work.texts)}")
        (output,) = await pooler.compute(work)
        yield output if request_id is None else dataclasses.replace(output, request_id=request_id)


class PoolingTasks(DoesNotGenerate):
    """Takes the place of an `AsyncLLM`'s threads for a pooling model, and refuses what only those can do."""

    def __init__(self, pooler: AsyncPooler, built: BuiltPooler):
        info = built.pooler.info
        self.engine, self.shut_down = built.engine, pooler.shutdown
        self.inputs = DoesNotGenerate(built.tokenizer, info.name, info.tasks)
        self.steps = _PoolingSteps(pooler, info.name, info.tasks)
        super().__init__(built.tokenizer, info.name, info.tasks)


class _PoolingSteps(DoesNotGenerate):
    def __init__(self, pooler: AsyncPooler, name: str, tasks: tuple[str, ...]):
        super().__init__(None, name, tasks)
        self._pooler = pooler

    @property
    def error(self) -> EngineDeadError | None:
        return EngineDeadError("the engine was shut down") if self._pooler.errored else None

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Nothing runs between calls, so `action` runs immediately."""
        done: Future[T] = Future()
        done.set_result(action())
        return done
