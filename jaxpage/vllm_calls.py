"""vLLM's further names of `LLM`: aliases, calls that have nothing to do here, and those refused with what to use."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from jaxpage.config import ResolvedConfig
from jaxpage.engine.stats import EngineStats


class VllmCalls:
    """Methods of `LLM`. Those that are refused raise NotImplementedError."""

    config: ResolvedConfig
    _engine: Any

    def __repr__(self) -> str:
        """One line: the model, and what it runs with."""
        config, stats = self.config, self._engine.stats()
        parts = [f"{config.model!r}", f"dtype={config.dtype}", f"device={_device(config)!r}"]
        parts += [f"max_model_len={config.max_model_len}"]
        if isinstance(stats, EngineStats):
            parts += [f"num_blocks={stats.num_blocks}", f"block_size={config.block_size}"]
        return f"LLM({', '.join(parts)})"

    @property
    def llm_engine(self) -> Any:
        """In vLLM the engine behind `LLM`; here the same object, which has the same methods."""
        return self

    @property
    def model_config(self) -> ResolvedConfig:
        """In vLLM the options about the model; here all options."""
        return self.config

    def reset_mm_cache(self) -> None:
        """No effect: pictures are cached by their contents, and the least recently used ones are evicted."""

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> NoReturn:
        """Refused: there are no worker processes."""
        raise NotImplementedError(
            f"collective_rpc({method!r}): there are no worker processes to call. update_weights replaces the weights, "
            "sleep and wake_up free and restore device memory, and a jaxpage.rl.Sampler runs on your own module"
        )

    def apply_model(self, func: Any) -> NoReturn:
        """Refused: the model is not a torch module."""
        raise NotImplementedError(
            "apply_model: the model is a Flax NNX module, which compiled programs read. jaxpage.rl.Sampler runs on a "
            "module that you hold, and research=ResearchConfig(...) captures or changes values inside it"
        )

    def enqueue(self, *args: Any, **options: Any) -> NoReturn:
        """Refused."""
        raise NotImplementedError("enqueue: use add_request, and step until it returns the outputs")

    enqueue_chat = wait_for_completion = enqueue

    def get_metrics(self) -> NoReturn:
        """Refused: an `LLM` has no registry of Prometheus."""
        raise NotImplementedError(
            "get_metrics: llm.stats() has the engine's counters, the metrics of each output are in output.metrics, and "
            "jaxpage serve has all under vLLM's names at /metrics"
        )


def _device(config: ResolvedConfig) -> str:
    first = jax.local_devices()[0] if config.mesh is None else config.mesh.devices.flat[0]
    shared = config.tensor_parallel_size or (1 if config.mesh is None else config.mesh.size)
    num_devices = shared * config.data_parallel_size
    return f"{num_devices} x {first.device_kind}" if num_devices > 1 else first.device_kind
