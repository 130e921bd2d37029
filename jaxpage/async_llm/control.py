"""What an operator or a trainer does to an engine for all requests at once: pauses, sleep, other weights."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypeVar

from jaxpage.async_llm.step_loop import PauseMode
from jaxpage.async_llm.tasks import Tasks
from jaxpage.device_memory import TAGS, DeviceMemory, check_tags, needed
from jaxpage.engine.errors import EngineAsleepError

T = TypeVar("T")


class EngineControl:
    """The part of an `AsyncLLM` that is about the engine and not about one request."""

    _tasks: Tasks
    _memory: DeviceMemory | None

    # Pauses.

    async def pause_generation(
        self, *, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> None:
        """Stop generating; returns when the device computes nothing any more. Requests that come now wait.

        Those that run are aborted, answered to their end, or kept as they are. `clear_cache`: forget all KV, so that
        weights may change; with "keep" it is computed anew. Raises ValueError for an unknown mode, EngineAsleepError
        while asleep.
        """
        if mode not in tuple(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(PauseMode)}, got {mode!r}")
        await self._call(self._check_awake)
        settled = await asyncio.wrap_future(self._tasks.pause(PauseMode(mode)))
        await asyncio.wrap_future(settled)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=mode == PauseMode.KEEP)

    async def resume_generation(self) -> None:
        """Go on, with the requests that came while paused. Raises EngineAsleepError while asleep."""

        def resume() -> None:
            self._check_awake()
            self._tasks.steps.resume()

        await self._call(resume)

    async def is_paused(self) -> bool:
        return self._tasks.steps.is_paused

    # Sleep.

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Pause, see `pause_generation`, and give the devices' memory back until `wake_up`.

        Level 1 frees the KV pool and moves the weights to the host; level 2 discards them, and others must come by
        `update_weights`. Requests that are kept are computed anew later. An engine that sleeps may go from level 1 to
        2. Raises ValueError for another level, and where several engines or hosts work together.
        """
        memory = needed(self._memory)
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level}")

        def fall_asleep() -> None:
            if not self._tasks.steps.is_paused:
                raise RuntimeError("generation was resumed before the engine could sleep")
            memory.sleep(keep_weights=level == 1)

        if not await self.is_sleeping():
            await self.pause_generation(mode=mode, clear_cache=False)
        await self._call(fall_asleep)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Have weights and KV pool on the devices again, and go on; nothing is compiled.

        `tags`: "weights", "kv_cache", only these of them; generation goes on once both are there. Raises ValueError for
        other tags, EngineAsleepError if the weights were discarded and no others have come.
        """
        memory, tags = needed(self._memory), check_tags(tags)

        def wake() -> None:
            memory.wake_up(tags)
            if memory.lacks is None:
                self._tasks.steps.resume()
            elif set(tags) == set(TAGS):
                self._check_awake()

        await self._call(wake)

    async def is_sleeping(self) -> bool:
        """Whether weights or KV pool are not on the devices."""
        return self._memory is not None and self._memory.lacks is not None

    # Weights.

    async def update_weights(self, model: str | Path, *, keep_cache: bool = False) -> int:
        """Have the weights of another checkpoint of the same model, between two steps; returns their version.

        `model`: a folder of safetensors or an Orbax checkpoint, also in a bucket. It is read into host memory while
        steps go on, and then moved to the devices, where one parameter at a time is there twice; nothing is compiled.
        Requests that run go on with the new weights and the KV that they have: pause before, with `clear_cache`, to
        have it computed anew. Cached KV is not found any more, unless `keep_cache`.

        Raises ValueError, and changes nothing, for a checkpoint that does not fit or is damaged, and where several
        engines or hosts work together.
        """
        memory = needed(self._memory)
        arrays = await asyncio.to_thread(memory.read, model)
        return await self._call(lambda: memory.replace_weights(arrays, keep_cache=keep_cache))

    async def weight_version(self) -> int:
        """How often the weights have been replaced. `CompletionOutput.weight_versions` counts the same."""
        return needed(self._memory).version

    # The rest.

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV. False, and nothing happens, while requests hold blocks.

        With `reset_running_requests` they give them back first, and are computed anew.
        """
        reset = functools.partial(
            self._tasks.engine.reset_prefix_cache, reset_running_requests=reset_running_requests
        )
        return await self._call(reset)

    async def check_health(self) -> None:
        """Raise EngineDeadError if requests can no longer be answered."""
        if self._tasks.steps.error is not None:
            raise self._tasks.steps.error

    @property
    def errored(self) -> bool:
        """Whether requests can no longer be answered."""
        return self._tasks.steps.error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    async def wait_until_warm(self) -> None:
        """Until every program is compiled. Raises what the compiler raised."""
        await asyncio.to_thread(self._tasks.engine.wait_until_warm)

    async def _call(self, action: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps."""
        return await asyncio.wrap_future(self._tasks.steps.call(action))

    def _check_awake(self) -> None:
        if self._memory is not None and self._memory.lacks is not None:
            raise EngineAsleepError(self._memory.lacks)
