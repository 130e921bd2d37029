"""Methods of `LLM` for its device memory, with vLLM's names: sleep, wake up, update weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from jaxpage.call_guard import OneCaller, interrupts_deferred
from jaxpage.device_memory import DeviceMemory, check_tags, needed
from jaxpage.engine.errors import EngineAsleepError
from jaxpage.engine.step_output import StepOutput
from jaxpage.output_processor import OutputProcessor


class MemoryCalls:
    """They need a single engine on one host, and raise ValueError otherwise."""

    _caller: OneCaller
    _engine: Any
    _outputs: OutputProcessor
    _memory: DeviceMemory | None = None

    def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Free the devices' memory until `wake_up`.

        Level 1 frees the KV pool and moves the weights to the host; level 2 discards them, and others must come by
        `update_weights`. Unfinished requests of `add_request` are aborted, answered to their end, or kept: these are
        computed anew later. An engine that sleeps may go from level 1 to 2. Raises ValueError for another level or
        mode.
        """
        memory = needed(self._memory)
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level}")
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode must be one of abort, wait, keep, got {mode!r}")
        with self._caller:
            if memory.lacks is None:
                self._settle(mode)
            memory.sleep(keep_weights=level == 1)

    def wake_up(self, tags: Collection[str] | None = None) -> bool:
        """Restore weights and KV pool on the devices; nothing is compiled. True if both are there.

        `tags`: restore only "weights" or "kv_cache". Raises ValueError for other tags, EngineAsleepError if the weights
        were discarded and not yet updated.
        """
        memory, tags = needed(self._memory), check_tags(tags)
        with self._caller:
            memory.wake_up(tags)
            if len(tags) > 1:
                self._check_awake()
            return memory.lacks is None

    def is_sleeping(self) -> bool:
        """Whether weights or KV pool are not on the devices."""
        return self._memory is not None and self._memory.lacks is not None

    def update_weights(self, model: str | Path, *, keep_cache: bool = False) -> int:
        """Load the weights of another checkpoint of the same model. Returns their version. Nothing is compiled.

        `model`: a folder of safetensors or an Orbax checkpoint, also in a bucket. It is read into host memory, and then
        moved to the devices, where one parameter at a time is there twice. Cached KV is not found any more, unless
        `keep_cache`. Raises ValueError, and changes nothing, for a checkpoint that does not fit or is damaged.
        """
        memory = needed(self._memory)
        with self._caller:
            return memory.replace_weights(memory.read(model), keep_cache=keep_cache)

    def weight_version(self) -> int:
        """How often the weights have been replaced. `CompletionOutput.weight_versions` counts the same."""
        return needed(self._memory).version

    def _settle(self, mode: str) -> None:
        """Make sure that no step is in flight."""
        if mode == "abort":
            with interrupts_deferred():
                ids = self._engine.unfinished_ids
                for request_id in ids:
                    self._engine.abort(request_id)
                self._outputs.abort(ids)
        while mode == "wait" and self._outputs.num_unfinished:
            self._take(self._engine.step)
        while self._engine.has_step_in_flight:
            self._take(self._engine.collect)

    def _take(self, move_on: Callable[[], StepOutput]) -> list[str]:
        raise NotImplementedError

    def _check_awake(self) -> None:
        if self._memory is not None and self._memory.lacks is not None:
            raise EngineAsleepError(self._memory.lacks)
