"""The state of the engine at a scrape: `EngineStats`, programs and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from jaxpage.engine.stats import EngineStats

if TYPE_CHECKING:
    from jaxpage.async_llm import AsyncLLM

Read = Callable[[EngineStats], float]
Sample = tuple[dict[str, str], float]  # further labels, value

# Running and waiting count sequences, as in vLLM: a request with n counts n times.
_GAUGES: dict[str, tuple[Read, str]] = {
    "vllm:num_requests_running": (lambda s: s.num_running, "Sequences that run."),
    "vllm:num_requests_waiting": (lambda s: s.num_waiting, "Sequences that wait to be scheduled."),
    "vllm:kv_cache_usage_perc": (lambda s: s.kv_cache_usage, "Share of KV blocks in use, 0 to 1."),
    "vllm:gpu_cache_usage_perc": (
        lambda s: s.kv_cache_usage,
        "The older name of vllm:kv_cache_usage_perc.",
    ),
    "jaxpage:kv_cache_waste": (
        lambda s: s.kv_waste,
        "Share of the slots of KV blocks in use that hold nothing, 0 to 1.",
    ),
    "jaxpage:replica_up": (
        lambda s: 1 - s.num_failed_replicas,
        "Whether a replica answers requests: 0 once its steps failed one after another.",
    ),
}
_COUNTERS: dict[str, tuple[Read, str]] = {
    "vllm:prefix_cache_queries": (
        lambda s: s.prefix_cache_queries,
        "Tokens looked up in the prefix cache.",
    ),
    "vllm:prefix_cache_hits": (lambda s: s.prefix_cache_hits, "Tokens found in the prefix cache."),
    "vllm:num_preemptions": (lambda s: s.num_preemptions, "Preemptions."),
    "vllm:prompt_tokens": (
        lambda s: s.prompt_tokens,
        "Tokens of prompts that were scheduled, cached ones included.",
    ),
    "vllm:prompt_tokens_cached": (
        lambda s: s.prefix_cache_hits,
        "Tokens of prompts that were found in the prefix cache.",
    ),
    "vllm:generation_tokens": (lambda s: s.generation_tokens, "Tokens generated."),
    "vllm:spec_decode_num_drafts": (
        lambda s: s.num_drafts,
        "Rows of steps in which the next tokens were guessed.",
    ),
    "vllm:spec_decode_num_draft_tokens": (lambda s: s.num_draft_tokens, "Tokens guessed."),
    "vllm:spec_decode_num_accepted_tokens": (
        lambda s: s.num_accepted_tokens,
        "Tokens guessed rightly.",
    ),
    "jaxpage:recompiles": (
        lambda s: s.num_recompiles,
        "Compilations on behalf of steps after warm-up; above 0 something is wrong.",
    ),
    "jaxpage:nan_steps": (lambda s: s.num_nan_steps, "Steps in which the model computed NaN."),
    "jaxpage:block_copies": (lambda s: s.num_block_copies, "KV blocks copied on write."),
    "jaxpage:prefix_cache_evictions": (
        lambda s: s.prefix_cache_evictions,
        "KV blocks that the prefix cache gave up.",
    ),
    "jaxpage:host_hit_blocks": (
        lambda s: s.num_host_hit_blocks,
        "Blocks that the prefix cache found in host memory or on disk.",
    ),
    "jaxpage:disk_hit_blocks": (
        lambda s: s.num_disk_hit_blocks,
        "Blocks that the prefix cache found on disk.",
    ),
    "jaxpage:blocks_swapped_out": (
        lambda s: s.num_blocks_swapped_out,
        "KV blocks moved to host memory.",
    ),
    "jaxpage:blocks_swapped_in": (
        lambda s: s.num_blocks_swapped_in,
        "KV blocks moved back from host memory.",
    ),
}
_ORIGINS = ("stored", "cached", "compiled")
_MEMORY = {
    "bytes_in_use": ("jaxpage:device_memory_in_use_bytes", "Device memory in use."),
    "peak_bytes_in_use": ("jaxpage:device_memory_peak_bytes", "The most that was in use."),
    "bytes_limit": ("jaxpage:device_memory_limit_bytes", "Device memory that can be used."),
}


class EngineMetrics:
    """A collector for prometheus_client. `labels` apply to all metrics; "engine" is the number of the replica."""

    def __init__(self, llm: AsyncLLM, labels: Mapping[str, str]):
        self._llm = llm
        self._labels = labels
        self._highest: dict[tuple[str, int], float] = {}  # of each counter of each replica

    def collect(self) -> Iterator[Metric]:
        """The metrics of a scrape."""
        stats = self._llm.stats()
        parts = stats.replicas or (stats,)
        for name, (read, text) in _GAUGES.items():
            yield self._gauge(name, text, [({}, read(part)) for part in parts])
        for name, (read, text) in _COUNTERS.items():
            counts = self._ascending(name, [read(part) for part in parts])
            yield self._counter(name, text, [[({}, count)] for count in counts])
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait to be scheduled, by why they do.",
            [({"reason": "capacity"}, part.num_waiting) for part in parts],
        )
        yield self._prompt_tokens_by_source(parts)
        if num_positions := self._llm.config.num_drafts:
            yield self._accepted_by_position(parts, num_positions)
        yield self._gauge(
            "vllm:cache_config_info",
            "Options of the KV cache.",
            [(self._cache_config(part), 1) for part in parts],
        )
        yield from self._programs(len(parts))
        yield from self._memory()

    def _ascending(self, name: str, values: Sequence[float]) -> list[float]:
        """Tokens after a stop string are counted until the text is decoded, but a falling counter means a restart."""
        for replica, value in enumerate(values):
            key = (name, replica)
            self._highest[key] = max(value, self._highest.get(key, 0.0))
        return [self._highest[name, replica] for replica in range(len(values))]

    def _prompt_tokens_by_source(self, parts: Sequence[EngineStats]) -> Metric:
        cached = [part.prefix_cache_hits for part in parts]
        computed = [part.prompt_tokens - hits for part, hits in zip(parts, cached, strict=True)]
        sources = {
            source: self._ascending(source, counts)
            for source, counts in (("local_compute", computed), ("local_cache_hit", cached))
        }
        return self._counter(
            "vllm:prompt_tokens_by_source",
            "Tokens of prompts that were scheduled, by where their KV came from.",
            [
                [({"source": source}, counts[replica]) for source, counts in sources.items()]
                for replica in range(len(parts))
            ],
        )

    def _accepted_by_position(self, parts: Sequence[EngineStats], num_positions: int) -> Metric:
        def counts(part: EngineStats) -> list[Sample]:
            known = dict(enumerate(part.accepted_per_position))
            return [({"position": str(i)}, known.get(i, 0)) for i in range(num_positions)]

        return self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens guessed rightly, by their position in the guess.",
            [counts(part) for part in parts],
        )

    def _cache_config(self, stats: EngineStats) -> dict[str, str]:
        config = self._llm.config
        num_tokens = stats.num_blocks * config.block_size
        about = {
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": num_tokens / config.max_model_len,
            "block_size": config.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "num_gpu_blocks": stats.num_blocks,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "swap_space": config.swap_space,
        }
        return {name: str(value) for name, value in about.items()}

    def _programs(self, num_replicas: int) -> Iterator[Metric]:
        """A program has no origin until it is compiled."""
        records = self._llm.programs()
        counts: list[list[Sample]] = []
        seconds: list[list[Sample]] = []
        for replica in range(num_replicas):
            own = [record for record in records if record.replica == replica]
            by_origin = {o: [record for record in own if record.origin == o] for o in _ORIGINS}
            counts.append([({"origin": o}, len(found)) for o, found in by_origin.items()])
            missing = sum(record.origin is None for record in own)
            counts[-1].append(({"origin": "pending"}, missing))
            seconds.append(
                [({"origin": o}, sum(r.seconds for r in found)) for o, found in by_origin.items()]
            )
        yield self._fill(
            GaugeMetricFamily,
            "jaxpage:executables",
            "Programs, by origin: loaded as an executable, compiled through jax's cache, or compiled.",
            counts,
        )
        yield self._counter(
            "jaxpage:compile_seconds",
            "Time spent on compiling or loading programs, summed over threads.",
            seconds,
        )

    def _memory(self) -> Iterator[Metric]:
        """CPUs do not report theirs."""
        devices = [(str(device.id), device.memory_stats() or {}) for device in jax.local_devices()]
        for key, (name, text) in _MEMORY.items():
            found = GaugeMetricFamily(name, text, labels=[*self._labels, "device"])
            for device, memory in devices:
                if key in memory:
                    found.add_metric([*self._labels.values(), device], memory[key])
            yield found

    def _gauge(self, name: str, text: str, values: Sequence[Sample]) -> Metric:
        """One value for each replica."""
        return self._fill(GaugeMetricFamily, name, text, [[value] for value in values])

    def _counter(self, name: str, text: str, samples: Sequence[Sequence[Sample]]) -> Metric:
        return self._fill(CounterMetricFamily, name, text, samples)

    def _fill(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        samples: Sequence[Sequence[Sample]],
    ) -> Metric:
        """The metric with the samples of each replica, all with the same further labels."""
        found = family(name, text, labels=[*self._labels, *samples[0][0][0]])
        for replica, own in enumerate(samples):
            labels = {**self._labels, "engine": str(replica)}
            for further, value in own:
                found.add_metric([*labels.values(), *further.values()], value)
        return found
