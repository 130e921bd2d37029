"""The composition root: the only module that knows everybody. From options to an engine that is ready to run."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxpage.config import (
    EngineConfig,
    ResolvedConfig,
    compiler_flags,
    default_sampling,
    eos_token_ids,
    load_generation_config,
    load_hf_config,
)
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.engine import Engine
from jaxpage.engine.host_tier import HostTier
from jaxpage.engine.scheduler import Scheduler
from jaxpage.kv_groups import KVGroups, Windows, group_layers
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.ops.attention import choose
from jaxpage.runner.block_store import BlockStore, fingerprint
from jaxpage.runner.buckets import Bucket, make_buckets
from jaxpage.runner.facts import machine_facts
from jaxpage.runner.host_memory import HostMemory, content_shapes
from jaxpage.runner.memory import Room, check_fits, pool_bytes, size_pool
from jaxpage.runner.program_store import NUM_BLOCKS, ProgramStore, Sizes
from jaxpage.runner.programs import use_persistent_cache
from jaxpage.runner.runner import Runner
from jaxpage.runner.step import StepSpec
from jaxpage.tokenizer import Detokenizer, load_tokenizer
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import join_projections, quantize
from pallas_kernels.paged_attention.tpu_layout import MOST_BLOCKS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.request import Request

logger = logging.getLogger("jaxpage")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An engine and what its users need to know of the model."""

    engine: Engine
    config: ResolvedConfig
    tokenizer: Any  # of transformers; None with `skip_tokenizer_init`
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # the first is EOS proper, the others are further stop ids
    default_sampling: dict[str, Any]


def build(options: EngineConfig, *, use_tqdm: bool = True) -> Built:
    """Read the checkpoint, size the pool, compile every step. Raises ValueError for what cannot be served.

    Order: everything that can be refused by reading small files comes before the weights, and what can be refused by
    arithmetic before the compilation.
    """
    _print_unless_configured()
    device = jax.local_devices()[0]
    hf_config = load_hf_config(options.model, options.hf_overrides)
    generation_config = load_generation_config(options)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    config = options.resolve(
        hf_config,
        platform=device.platform,
        device_kind=device.device_kind,
        device_memory=memory,
    )
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer)
    use_persistent_cache(config.compilation_cache_dir)
    model = registry.build(hf_config, dtype=config.dtype, max_model_len=config.max_model_len)
    groups = group_layers(model.config.windows, config.max_model_len)
    pool, reason = choose(
        make_pool_spec(config, model.config, groups, device.platform),
        platform=device.platform,
        num_devices=1,
        table=(config.max_num_seqs, -(-config.max_model_len // config.block_size)),
        num_heads=model.config.num_heads,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),  # of GPUs
    )
    if reason:
        logger.warning("attention runs in plain XLA: %s", reason)
    if config.load_format == "dummy":
        initialise(model, seed=config.seed)
    else:
        load(model, config.model, use_tqdm=use_tqdm)
    join_projections(model)
    if config.quantization == "int8":
        quantize(model, platform=device.platform)
    config, runner = _make_runner(config, model, groups, pool, device)
    if config.fit_max_model_len:
        _check_same_ropes(hf_config, config, model)
    scheduler = _make_scheduler(config, runner, tokenizer)
    logger.info("%s", config.describe())
    runner.warmup()
    engine = Engine(scheduler, runner, overlap=config.async_scheduling)
    if config.kv_offload_dir is not None:
        # Exit functions run in the reverse order of their registration: this one before jax's own.
        atexit.register(_save_prefix_cache, weakref.ref(engine))
    vocab_size = model.config.vocab_size
    eos = eos_token_ids(hf_config, generation_config, tokenizer)
    return Built(
        engine=engine,
        config=config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        # Tokenizers may know more ids than the model; those it can never sample.
        eos_token_ids=tuple(i for i in eos if i < vocab_size),
        default_sampling=default_sampling(generation_config),
    )


def _save_prefix_cache(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.save_prefix_cache()


def _print_unless_configured() -> None:
    """What the engine says of itself goes to stderr, unless the user has said where logs go."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def _make_runner(
    config: ResolvedConfig, model: CausalLM, groups: KVGroups, pool: KVPoolSpec, device: jax.Device
) -> tuple[ResolvedConfig, Runner]:
    """The runner with its pool sized, and the config with what the sizing decided."""
    machine = machine_facts(device, compiler_flags())
    root = programs_folder(config)

    def runner_of(
        config: ResolvedConfig,
        buckets: tuple[Bucket, ...],
        num_blocks: int,
        host_memory: HostMemory | None = None,
        store: ProgramStore | None = None,
    ) -> Runner:
        return Runner(
            model,
            buckets=buckets,
            pool_spec=dataclasses.replace(pool, num_blocks=num_blocks),
            step_spec=make_step_spec(config, model.config, groups),
            ahead_of_time=not config.enforce_eager,
            host_memory=host_memory,
            store=store,
        )

    def temp_bytes(bucket: Bucket) -> int:
        # The pool's size does not matter to the temporaries; the smallest is enough to ask.
        return runner_of(config, (bucket,), 2).bytes_besides_pool(bucket)

    def available(temp_bytes: int) -> int:
        return pool_bytes(
            (device,),
            utilization=config.gpu_memory_utilization,
            temp_bytes=temp_bytes,
            share_of_free=config.cache_max_entry_count,
        )

    sizes = Sizes(root, machine | program_facts(config, model, pool))
    config = size_kv(config, pool, groups.windows, available, temp_bytes, sizes)
    assert config.num_gpu_blocks_override is not None
    sized = dataclasses.replace(pool, num_blocks=config.num_gpu_blocks_override)
    store = None
    if root is not None:
        store = ProgramStore(root, machine | program_facts(config, model, sized), [device])
        reason = store.why_empty()
        if reason:
            logger.info("the programs in %s are not for this start: %s", root, reason)
    memory = _make_host_memory(config, model, groups, pool, device)
    return config, runner_of(config, buckets_of(config), sized.num_blocks, memory, store)


def programs_folder(config: ResolvedConfig) -> Path | None:
    """Where compiled programs are kept; None if they are not."""
    if config.enforce_eager or not config.compilation_cache_dir:
        return None
    return Path(config.compilation_cache_dir) / "programs"


def program_facts(config: ResolvedConfig, model: CausalLM, pool: KVPoolSpec) -> dict[str, str]:
    """What the programs of an engine depend on besides the machine, as text."""
    groups = group_layers(model.config.windows, config.max_model_len)
    parameters = [f"{path}: {spec.shape} {spec.dtype}" for path, spec in specs(model).items()]
    return {
        "model": repr(model.config),
        "parameters": hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16],
        "KV pool": repr(pool),
        "steps": repr(make_step_spec(config, model.config, groups)),
        "rows": str(buckets_of(config)[-1].num_rows),
        "moves blocks": str(config.swap_space > 0),
    }


def buckets_of(config: ResolvedConfig) -> tuple[Bucket, ...]:
    """The padded sizes of its steps."""
    return make_buckets(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )


def _make_host_memory(
    config: ResolvedConfig, model: Any, groups: KVGroups, pool: KVPoolSpec, device: jax.Device
) -> HostMemory | None:
    """Host blocks of `swap_space`, and the store on disk behind them."""
    if config.swap_space == 0:
        return None
    num_blocks = int(config.swap_space * 2**30) // pool.bytes_per_block
    if num_blocks == 0:
        raise ValueError(
            f"swap_space={config.swap_space} GiB holds no block of {pool.bytes_per_block} bytes"
        )
    store = None
    if config.kv_offload_dir is not None:
        shapes = content_shapes(dataclasses.replace(pool, num_blocks=2).abstract())
        facts = [repr(model.config), repr(groups), repr(pool)]
        parameters = jax.tree.leaves(nnx.state(model))
        folder = Path(config.kv_offload_dir) / fingerprint(facts, map(np.asarray, parameters))
        store = BlockStore(folder, [x.shape for x in shapes], [x.dtype for x in shapes])
    return HostMemory(num_blocks, device=None if device.platform == "cpu" else device, store=store)


def size_kv(
    config: ResolvedConfig,
    pool: KVPoolSpec,
    windows: Windows,
    available: Callable[[int], int],
    temp_bytes: Callable[[Bucket], int],
    sizes: Sizes,
) -> ResolvedConfig:
    """The config with the number of KV blocks, and with what it makes of the two token limits.

    `available(temp_bytes)` are the bytes for the pool, `temp_bytes(bucket)` what a step needs besides: compiled for
    this unless `sizes` knows it. Programs are for a number of blocks, so that of the last time is taken again if it
    fits and is not much smaller than what would.
    """
    room = Room(
        windows=windows,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None and config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // pool.bytes_per_block
    if num_blocks is None:
        num_blocks, room = size_pool(
            available=available,
            temp_bytes=lambda bucket: sizes.remember(bucket.name, lambda: temp_bytes(bucket)),
            bytes_per_block=pool.bytes_per_block,
            room=room,
            max_model_len=config.max_model_len,
            must_fit=not config.fit_max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        num_blocks = sizes.settle(NUM_BLOCKS, num_blocks)
    if pool.lanes:  # their kernel's block tables can name no more
        num_blocks = min(num_blocks, MOST_BLOCKS)
    max_model_len = config.max_model_len
    if config.fit_max_model_len:
        max_model_len = max(2, room.longest(max_model_len, num_blocks))
    # With blocks counted out by the user, the scheduler refuses the single request that is too long.
    if config.num_gpu_blocks_override is None:
        check_fits(
            room,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            available=num_blocks * pool.bytes_per_block,
        )
    return dataclasses.replace(
        config,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=room.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def _check_same_ropes(hf_config: PretrainedConfig, config: ResolvedConfig, model: Any) -> None:
    """Some RoPE types depend on max_model_len, which may have been fitted after the model was made."""
    length = config.max_model_len
    fitted = registry.build(hf_config, dtype=config.dtype, max_model_len=length)
    if fitted.config.ropes != model.config.ropes:
        raise ValueError(
            f'max_model_len="auto" came to {length}, and the RoPE of this model depends on it; '
            f"pass max_model_len={length}"
        )


def make_pool_spec(
    config: ResolvedConfig, model: ModelConfig, groups: KVGroups, platform: str | None = None
) -> KVPoolSpec:
    """The pool of a model, as yet without a block. Raises ValueError for a head_dim that int4 cannot pack."""
    return KVPoolSpec(
        num_arrays=groups.num_arrays,
        num_blocks=0,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=jax.numpy.dtype(config.dtype),
        format=None if config.kv_cache_dtype == config.dtype else config.kv_cache_dtype,
        platform=platform,
    )


def make_step_spec(config: ResolvedConfig, model: ModelConfig, groups: KVGroups) -> StepSpec:
    vocab_size = model.vocab_size
    return StepSpec(
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        num_blocks_per_row=-(-config.max_model_len // config.block_size),
        groups=groups,
        num_slots=config.max_num_seqs + 1,
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        dtype=model.dtype,
        decode_steps=config.decode_steps,
        num_top_logprobs=vocab_size
        if config.max_logprobs == -1
        else min(config.max_logprobs, vocab_size),
        logprobs_mode=config.logprobs_mode,
    )


def _make_scheduler(config: ResolvedConfig, runner: Runner, tokenizer: Any) -> Scheduler:
    def make_detokenizer(request: Request) -> Detokenizer | None:
        if tokenizer is None or not request.params.detokenize:
            return None
        return Detokenizer(tokenizer, request.params, request.prompt_token_ids)

    pool = BlockPool(
        runner.pool_spec.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=runner.groups.windows,
    )
    tier, memory = None, runner.host_memory
    if memory is not None:
        tier = HostTier(
            memory.num_blocks, pool, preemption_mode=config.preemption_mode, store=memory.store
        )
    return Scheduler(
        pool,
        tier=tier,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        make_detokenizer=make_detokenizer,
    )
