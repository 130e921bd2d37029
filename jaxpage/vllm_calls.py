"""vLLM's further names of `LLM`: aliases, calls that have nothing to do here, and those refused with what to use. And
what to use instead of attributes that only vLLM's `LLM`, its engine or its `AsyncLLM` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxpage.config import ResolvedConfig
from jaxpage.engine.stats import EngineStats

_OPTIONS = ("vllm_config", "cache_config", "scheduler_config", "parallel_config", "lora_config")
_PROCESSES = ("model_executor", "engine_core", "renderer", "input_processor", "output_processor")
_WEIGHTS = (
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
    *("start_draft_weight_update", "finish_weight_update", "update_weight_version"),
    *("get_weight_version", "set_weight_version"),
)
# Attribute of vLLM -> what to use instead.
_INSTEAD = {
    **dict.fromkeys(_OPTIONS, "config has all options, and stats() the number of blocks"),
    **dict.fromkeys(
        _PROCESSES, "there are no worker processes to reach into; update_weights replaces weights"
    ),
    **dict.fromkeys(
        _WEIGHTS,
        "update_weights reads a checkpoint and returns the new version, also in weight_version; a "
        "jaxpage.rl.Sampler runs on a module that you hold",
    ),
    **dict.fromkeys(
        ("supported_tasks", "get_supported_tasks"),
        "a call that the model has no task for raises a ValueError that names its tasks",
    ),
    **dict.fromkeys(("do_log_stats", "do_log_stats_with_interval"), "stats() has the counters"),
    "tokenizer": "call get_tokenizer()",
    "get_world_size": "the engine has tensor_parallel_size of this process's devices",
    "release_kv_cache_memory": "sleep() releases it; the weights move to the host until wake_up()",
    "reset_encoder_cache": "pictures are cached by their contents, none is ever stale",
    "pin_lora": "adapters of running requests stay, and the last max_cpu_loras that were used",
    "is_tracing_enabled": "spans of requests are sent by jaxpage serve --otlp-traces-endpoint",
    # Of AsyncLLM only.
    "add_request": "await start(), which returns a stream of outputs",
    "wait_for_requests_to_drain": 'await pause_generation(mode="wait"), then resume_generation()',
    "collective_rpc": "there are no worker processes to call; update_weights replaces the weights",
    "get_model_config": "model_config has all options",
}


class VllmNames:
    """Of a missing attribute that vLLM has, the AttributeError says what to use instead."""

    if not TYPE_CHECKING:  # which otherwise would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            # Python comes here too if a property raises AttributeError, and drops the error: once more, to raise it.
            if hasattr(type(self), name):
                return super().__getattribute__(name)
            advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)


class VllmCalls(VllmNames):
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
