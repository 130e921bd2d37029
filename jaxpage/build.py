"""The composition root: from options to an engine that is ready to run. The only module that knows all others.

Its steps up to the programs are those of `composition`, which `jaxpage compile` and `jaxpage plan` take too.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpage.adapter_cache import AdapterCache
from jaxpage.checkpoint_config import default_sampling, eos_token_ids, load_generation_config
from jaxpage.composition import (
    executable_cache,
    size_from_cache,
    spec_of_this_machine,
    specs_of_this_machine,
    with_sizes,
)
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.device_memory import DeviceMemory
from jaxpage.draft_model import named_errors
from jaxpage.engine.engine import Engine
from jaxpage.engine.replicas import Replicas
from jaxpage.engine_spec import EngineSpec
from jaxpage.environment import compiler_flags
from jaxpage.hosts.agreement import check_same, smallest, wait_for_all
from jaxpage.hosts.group import Hosts, end_with_main_thread
from jaxpage.hosts.join import join
from jaxpage.make_scheduler import make_scheduler
from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.pictures.border import PictureProcessor
from jaxpage.research_config import ResearchSpec
from jaxpage.runner.block_store import BlockStore, fingerprint
from jaxpage.runner.fingerprint import machine_fingerprint
from jaxpage.runner.host_memory import HostMemory, content_shapes, content_shardings
from jaxpage.runner.memory import check_room, pool_bytes
from jaxpage.runner.programs import use_persistent_cache
from jaxpage.runner.recording import parse, read_calls, record_to
from jaxpage.runner.runner import Runner
from jaxpage.start_up_log import log_engine, log_ready, log_replicas, print_unless_configured
from jaxpage.tokenizer import load_tokenizer
from jaxpage.weights.adapters import adapter_reader
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load

logger = logging.getLogger("jaxpage")

Bind = Callable[[EngineSpec], EngineSpec] | None

# Options that do not affect what programs compute, or that name other files or devices.
_NOT_REPLAYED = (
    "record_calls",
    "kv_offload_dir",
    "hf_token",
    "compilation_cache_dir",
    "structured_outputs_config",
    "mesh",
    *("nnodes", "node_rank", "dist_init_addr"),
)
_SIZES = ("num_gpu_blocks_override", "max_model_len", "max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An engine, and what its users need to know about the model."""

    engine: Engine | Replicas
    config: ResolvedConfig
    # Live: a trainer may replace its parameters between steps. With `data_parallel_size` it is the first replica's
    # model, and the others have their own parameters.
    model: CausalLM
    tokenizer: Any  # of transformers; None with `skip_tokenizer_init`
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # first the tokenizer's EOS, then further stop ids
    default_sampling: dict[str, Any]
    hosts: Hosts | None = None  # the other hosts of this engine
    picture_processor: PictureProcessor | None = None  # for models that take pictures
    most_patches: int = 0  # of a picture
    adapters: AdapterCache | None = None  # with `enable_lora`
    research: ResearchSpec | None = None
    has_recurrent_state: bool = False  # some layers of the model
    memory: DeviceMemory | None = None  # of one engine on one host, with parameters of its own


def build(options: EngineConfig, *, use_tqdm: bool = True, bind: Bind = None) -> Built:
    """Read the checkpoint, size the pool, compile the programs. Raises ValueError for what is not supported.

    With `bind` no checkpoint is read: it returns the spec with an abstract model, and the caller must tell the runner
    which parameters to read before the first step. This is for one engine in one process.

    Order: everything that can be refused from small files comes before the weights, and everything that can be refused
    by arithmetic before compilation.
    """
    print_unless_configured()
    if options.runner == "pooling":
        raise ValueError(
            'runner="pooling" is for LLM, AsyncLLM and jaxpage serve; this engine generates text'
        )
    start = time.perf_counter()
    hosts = join(options)
    if hosts is not None:
        # Exit functions run in the reverse order of their registration: these before jax's own.
        atexit.register(hosts.exit_if_lost)
        hosts.when_lost(end_with_main_thread)
        if not hosts.is_leader:
            _follow(hosts, options)
            raise SystemExit(0)
        atexit.register(hosts.stop)
    with nullcontext() if hosts is None else hosts.starting():
        return _build(options, hosts, start=start, use_tqdm=use_tqdm, bind=bind)


def _build(
    options: EngineConfig, hosts: Hosts | None, *, start: float, use_tqdm: bool, bind: Bind
) -> Built:
    options = options.with_local_files()
    specs = specs_of_this_machine(options)
    if hosts is not None:
        check_same(hosts, options, specs[0], flags=compiler_flags())
    given = specs[0].config
    generation_config = load_generation_config(given)
    tokenizer = None if given.skip_tokenizer_init else load_tokenizer(given.tokenizer)
    processor = specs[0].picture_processor(tokenizer)
    log_replicas(specs)
    parts = [
        _build_one(options, spec, hosts=hosts, use_tqdm=use_tqdm, is_first=i == 0, bind=bind)
        for i, spec in enumerate(specs)
    ]
    sized = [spec for spec, _ in parts]
    runners: list[Any] = [engine.runner for _, engine in parts]
    config, model = _common_config([spec.config for spec in sized]), sized[0].model
    log_ready(
        [runner.programs for runner in runners],
        ahead_of_time=not config.enforce_eager,
        seconds=time.perf_counter() - start,
    )
    engine = parts[0][1] if len(parts) == 1 else Replicas([engine for _, engine in parts])
    if config.kv_offload_dir is not None:
        atexit.register(_save_prefix_cache, weakref.ref(engine))
    is_shared = len(parts) > 1 or hosts is not None or bind is not None
    vocab_size = model.config.vocab_size
    eos = eos_token_ids(sized[0].hf_config, generation_config, tokenizer)
    return Built(
        engine=engine,
        config=config,
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        # Tokenizers may know more ids than the model; those it can never sample.
        eos_token_ids=tuple(i for i in eos if 0 <= i < vocab_size),
        default_sampling=default_sampling(generation_config),
        hosts=hosts,
        picture_processor=processor,
        most_patches=0 if sized[0].picture_spec is None else sized[0].picture_spec.sizes[-1],
        adapters=_make_adapters(config, model) if config.enable_lora else None,
        research=sized[0].research,
        has_recurrent_state=model.config.recurrent is not None,
        memory=None if is_shared else DeviceMemory(sized[0], parts[0][1], runners[0]),
    )


def _make_adapters(config: ResolvedConfig, model: CausalLM) -> AdapterCache:
    num_slots = config.max_loras
    read = adapter_reader(model, num_slots=num_slots, max_rank=config.max_lora_rank)
    return AdapterCache(read, config.max_cpu_loras or num_slots)


def _follow(hosts: Hosts, options: EngineConfig) -> None:
    """Follow the leader until it ends."""
    with hosts.starting():
        options = options.with_local_files()
        spec = spec_of_this_machine(options)
        check_same(hosts, options, spec, flags=compiler_flags())
        _, runner = make_runner(spec, hosts=hosts)
        runner.warmup()
        wait_for_all(hosts)

    def execute(body: bytes) -> None:
        _, metadata, arrays = parse(body)
        runner.execute(read_calls(metadata, arrays))

    hosts.follow(execute)
    logger.info("the leader has ended")
    # While the leader is there: jax would end this process with an error after it.
    jax.distributed.shutdown()
    hosts.leave()


def _build_one(
    options: EngineConfig,
    spec: EngineSpec,
    *,
    hosts: Hosts | None,
    use_tqdm: bool,
    is_first: bool,
    bind: Bind,
) -> tuple[EngineSpec, Engine]:
    """The sized spec of an engine, and the engine, warm enough for a first prompt. Replicas are alike, so only the
    first one logs its properties.
    """
    level = INFO if is_first else DEBUG
    sized, runner = make_runner(spec, use_tqdm=use_tqdm, log_level=level, hosts=hosts, bind=bind)
    config = sized.config
    if config.record_calls is not None:
        runner.recorder = record_to(config.record_calls, _recording_header(options, sized))
        weakref.finalize(runner, runner.recorder.close)
    scheduler = make_scheduler(sized, runner)
    runner.warmup()
    if hosts is not None:
        wait_for_all(hosts)
        runner.other_hosts = hosts
        weakref.finalize(runner, hosts.stop).atexit = False
    return sized, Engine(scheduler, runner, overlap=config.async_scheduling)


def _common_config(configs: list[ResolvedConfig]) -> ResolvedConfig:
    """The config of the first engine, with the smallest `max_model_len` of all."""
    return replace(configs[0], max_model_len=min(config.max_model_len for config in configs))


def make_runner(
    spec: EngineSpec,
    *,
    use_tqdm: bool = True,
    log_level: int = INFO,
    hosts: Hosts | None = None,
    bind: Bind = None,
) -> tuple[EngineSpec, Runner]:
    """The spec with its weights loaded and its pool sized, and a runner for it, not warm yet. Raises ValueError.

    With several `hosts`, sizes are those of the smallest. `bind`: see `build`.
    """
    config = spec.config
    use_persistent_cache(config.compilation_cache_dir)
    use_tqdm = use_tqdm and config.use_tqdm_on_load
    for model, folder, hf_config, *_ in spec.models if bind is None else ():
        with nullcontext() if model is spec.model else named_errors():
            if config.load_format == "dummy":
                initialise(model, seed=config.seed, mesh=spec.mesh)
            else:
                load(model, folder, mesh=spec.mesh, use_tqdm=use_tqdm, hf_config=hf_config)
    slow_products = spec.transform_weights(join=bind is None)
    spec = spec if bind is None else bind(spec)
    sized, runner = _size_runner(spec, hosts)
    if config.fit_max_model_len:
        _check_same_ropes(sized)
    log_engine(sized, slow_products, level=log_level)
    return sized, runner


def _save_prefix_cache(reference: weakref.ref[Engine | Replicas]) -> None:
    engine = reference()
    if engine is not None:
        engine.save_prefix_cache()


def _size_runner(spec: EngineSpec, hosts: Hosts | None) -> tuple[EngineSpec, Runner]:
    """The spec with its pool sized, and a runner for it. The weights must be loaded: their memory is measured."""
    cache = executable_cache(spec, flags=compiler_flags(), devices=spec.devices)

    def available(temp_bytes: int) -> int:
        return pool_bytes(
            spec.local_devices,
            utilization=spec.config.gpu_memory_utilization,
            temp_bytes=temp_bytes,
            share_of_free=spec.config.cache_max_entry_count,
        )

    _check_room(spec, spec.num_blocks_given or 0)
    sized = size_from_cache(spec, cache, available)
    if hosts is not None:
        sizes = {
            "num_blocks": sized.pool.num_blocks,
            "max_num_batched_tokens": sized.config.max_num_batched_tokens,
            "max_model_len": sized.config.max_model_len,
        }
        sized = with_sizes(spec, **smallest(hosts, sizes))
    _check_room(sized, sized.pool.num_blocks)
    store = cache.store(sized)
    reason = None if store is None else store.why_empty()
    if reason:
        logger.debug("cached executables in %s do not match this start: %s", cache.root, reason)
    runner = Runner(
        sized.lowerings(),
        ahead_of_time=not sized.config.enforce_eager,
        host_memory=_make_host_memory(sized),
        store=store,
    )
    return sized, runner


def _check_room(spec: EngineSpec, num_blocks: int) -> None:
    check_room(
        spec.local_devices,
        pool_bytes=num_blocks * spec.block_bytes,
        host_bytes=int(spec.config.swap_space * 2**30) // spec.config.nnodes,
    )


def _make_host_memory(spec: EngineSpec) -> HostMemory | None:
    """The host blocks of `swap_space`, and the store on disk for the third tier."""
    config, pools = spec.config, spec.pools
    if config.swap_space == 0:
        return None
    block_bytes = sum(pool.bytes_per_block for pool in pools)
    num_blocks = int(config.swap_space * 2**30) // block_bytes
    if num_blocks == 0:
        raise ValueError(
            f"swap_space={config.swap_space} GiB holds no block of {block_bytes} bytes"
        )
    store = None
    if config.kv_offload_dir is not None:
        shapes = [x for pool in pools for x in content_shapes(pool)]
        models = [each.model for each in spec.models]
        # Any number of blocks of the pool will do: blocks on disk fit all of them.
        layouts = [repr(replace(pool, num_blocks=0)) for pool in pools]
        described = [*(repr(each.config) for each in models), repr(spec.groups), *layouts]
        if config.numerics == "strict":  # each bit counts, and other programs round otherwise
            machine = machine_fingerprint(spec.device, compiler_flags())
            described.append(f"{machine} {spec.num_devices}")
        parameters = jax.tree.leaves([nnx.state(each) for each in models])
        folder = Path(config.kv_offload_dir) / fingerprint(described, map(np.asarray, parameters))
        store = BlockStore(folder, [x.shape for x in shapes], [x.dtype for x in shapes])
    shardings = None
    if spec.device.platform != "cpu":
        shardings = [x for pool in pools for x in content_shardings(pool, spec.mesh)]
    return HostMemory(num_blocks, shardings=shardings, store=store)


def _check_same_ropes(spec: EngineSpec) -> None:
    """Some RoPE types depend on max_model_len, which may have been reduced after the model was created."""
    config, length = spec.config, spec.config.max_model_len
    fitted = registry.build(spec.hf_config, dtype=config.dtype, max_model_len=length)
    if fitted.config.ropes != spec.model.config.ropes:
        raise ValueError(
            f'max_model_len="auto" came to {length}, and the RoPE of this model depends on it; '
            f"pass max_model_len={length}"
        )


def _recording_header(options: EngineConfig, sized: EngineSpec) -> dict[str, Any]:
    """The engine's options, sizes and number of devices, for the header of a recording. Raises ValueError."""
    if callable(options.hf_overrides):
        raise ValueError("record_calls cannot write down a function; give hf_overrides as a dict")
    fields = dataclasses.fields(EngineConfig)
    given = {f.name: getattr(options, f.name) for f in fields if f.name not in _NOT_REPLAYED}
    for name in ("reasoning_config", "speculative_config", "research"):
        if (values := getattr(options, name)) is not None:
            given[name] = vars(values)
    found = {name: getattr(sized.config, name) for name in ("model", *_SIZES)}
    return {
        "options": given | found | {"tensor_parallel_size": sized.num_devices},
        "num_cached_states": sized.num_cached_states,
    }
