"""What an operator or a trainer does to a whole engine: pause it, put it to sleep, replace its weights."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypeVar

from jaxpage.async_llm.step_loop import PauseMode
from jaxpage.async_llm.tasks import Tasks
from jaxpage.device_memory import TAGS, DeviceMemory, check_tags, needed
from jaxpage.engine.errors import EngineAsleepError, EngineDeadError
from jaxpage.profiling import start_trace, stop_trace

T = TypeVar("T")


class EngineControl:
    """The methods of an `AsyncLLM` that concern the engine, not a single request."""

    _tasks: Tasks
    _memory: DeviceMemory | None

    # Pauses.

    async def pause_generation(
        self, *, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> None:
        """Stop generating; returns once the device is idle. Requests that arrive in the meantime wait.

        Running requests are aborted ("abort"), finished ("wait") or suspended ("keep"). `clear_cache`: discard all KV,
        so that weights may change; the KV of suspended requests is recomputed. Raises ValueError for an unknown mode,
        EngineAsleepError while asleep.
        """
        if mode not in tuple(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(PauseMode)}, got {mode!r}")
        settled = await asyncio.wrap_future(self._tasks.pause(PauseMode(mode), self._check_awake))
        await asyncio.wrap_future(settled)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=mode == PauseMode.KEEP)

    async def resume_generation(self) -> None:
        """Continue, including the requests that arrived during the pause. Raises EngineAsleepError while asleep."""

        def resume() -> None:
            self._check_awake()
            self._tasks.steps.resume()

        await self._call(resume)

    async def is_paused(self) -> bool:
        return self._tasks.steps.is_paused

    # Sleep.

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Pause (see `pause_generation`) and release device memory until `wake_up`.

        Level 1 frees the KV pool and moves the weights to the host; level 2 discards them, so `update_weights` must
        supply new ones. The KV of suspended requests is recomputed later. A sleeping engine may go from level 1 to 2.
        Level 0 is only the pause, for any number of engines, and frees nothing: `is_paused`, not `is_sleeping`.

        Raises ValueError for any other level, and above 0 with several engines or hosts; RuntimeError if another
        caller lets steps run again before the engine sleeps.
        """
        if level == 0:
            return await self.pause_generation(mode=mode, clear_cache=False)
        memory = needed(self._memory)
        if level not in (1, 2):
            raise ValueError(f"level must be 0, 1 or 2, got {level}")

        def fall_asleep() -> None:
            self._tasks.steps.check_suspended()
            memory.sleep(keep_weights=level == 1)

        if not await self.is_sleeping():
            await self.pause_generation(mode=mode, clear_cache=False)
        await self._call(fall_asleep)

    async def wake_up(self, tags: Collection[str] | None = None) -> bool:
        """Restore weights and KV pool on the devices, and continue; nothing is compiled. True if both are there.

        `tags`: restore only these of "weights" and "kv_cache"; generation continues once both are there. With
        ["scheduling"] it continues after level 0. Raises ValueError for other tags, EngineAsleepError if the weights
        were discarded and have not been replaced.
        """
        if tags is not None and list(tags) == ["scheduling"]:
            await self.resume_generation()
            return True
        memory, tags = needed(self._memory), check_tags(tags)

        def wake() -> bool:
            memory.wake_up(tags)
            if memory.lacks is None:
                self._tasks.steps.resume()
            elif set(tags) == set(TAGS):
                self._check_awake()
            return memory.lacks is None

        return await self._call(wake)

    async def is_sleeping(self) -> bool:
        """Whether the weights or the KV pool are missing from the devices."""
        return self._memory is not None and self._memory.lacks is not None

    # Weights.

    async def update_weights(self, model: str | Path, *, keep_cache: bool = False) -> int:
        """Load the weights of another checkpoint of the same model, between two steps; returns their version.

        `model`: a folder of safetensors or an Orbax checkpoint, which may be in a bucket. It is read into host memory
        while steps continue, then moved to the devices, where at most one parameter exists twice; nothing is compiled.
        Running requests continue with the new weights and their existing KV: pause first, with `clear_cache`, to have
        it recomputed. Cached KV is no longer found, unless `keep_cache`.

        Raises ValueError, and changes nothing, for a checkpoint that does not fit or is damaged, and with several
        engines or hosts.
        """
        memory = needed(self._memory)
        arrays = await asyncio.to_thread(memory.read, model)
        return await self._call(lambda: memory.replace_weights(arrays, keep_cache=keep_cache))

    async def weight_version(self) -> int:
        """How often the weights have been replaced; `CompletionOutput.weight_versions` uses the same count."""
        return needed(self._memory).version

    # Cache and health.

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Discard all cached KV. Does nothing and returns False while requests hold blocks.

        With `reset_running_requests` they first release their blocks, and their KV is recomputed. `reset_connector` has
        no effect: there is no connector.
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

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """What `check_health` raises once the engine is dead."""
        return self._tasks.steps.error or EngineDeadError()

    async def start_profile(self, profile_prefix: str | Path | None = None) -> None:
        """See `LLM.start_profile`."""
        await asyncio.to_thread(start_trace, profile_prefix)

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await asyncio.to_thread(stop_trace)

    async def wait_until_warm(self) -> None:
        """Wait until every program is compiled. Raises what the compiler raised."""
        await asyncio.to_thread(self._tasks.engine.wait_until_warm)

    async def _call(self, action: Callable[[], T]) -> T:
        """Run `action` in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._tasks.steps.call(action))

    def _check_awake(self) -> None:
        if self._memory is not None and self._memory.lacks is not None:
            raise EngineAsleepError(self._memory.lacks)
