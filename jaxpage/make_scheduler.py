"""The scheduler of an engine, its KV cache and its picture cache, from the engine's spec."""

from __future__ import annotations

from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.padding import Padding
from jaxpage.engine.picture_cache import PictureCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.state_cache import StateCache
from jaxpage.engine_spec import EngineSpec
from jaxpage.runner.runner import Runner


def make_scheduler(spec: EngineSpec, runner: Runner) -> Scheduler:
    """The scheduler of an engine that runs on `runner`, whose pool has its blocks."""
    config, pictures, memory = spec.config, spec.picture_spec, runner.host_memory
    on_cpu = spec.device.platform == "cpu"
    prompt_sizes = tuple(bucket.num_tokens for bucket in runner.buckets if not bucket.decode)
    cached_states = spec.step_spec.cached_state_slots
    kv = KVCache(
        runner.pool_spec.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=runner.groups.windows,
        num_host_blocks=0 if memory is None else memory.num_blocks,
        preemption_mode=config.preemption_mode,
        store=None if memory is None else memory.store,
        states=StateCache(cached_states, config.block_size) if cached_states else None,
    )
    budget = config.max_num_batched_tokens
    whole = pictures is not None and pictures.vision.bidirectional
    return Scheduler(
        kv,
        num_adapters=config.max_loras if config.enable_lora else 0,
        pictures=pictures and PictureCache(pictures.num_rows, budget=budget, whole=whole),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        speculative=config.speculative_config,
        samples_late=not on_cpu,  # where the host would only take the device's cores
        # Of usual devices, operations for each byte that they read.
        padding=Padding(prompt_sizes, overhead=16 if on_cpu else 256),
    )
