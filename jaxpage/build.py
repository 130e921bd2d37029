"""The composition root: the only module that knows everybody. From options to an engine that is ready to run."""

from __future__ import annotations

import atexit
import dataclasses
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
)
from jaxpage.engine.engine import Engine
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.models import registry
from jaxpage.runner.block_store import BlockStore, fingerprint
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.facts import machine_facts
from jaxpage.runner.host_memory import HostMemory, content_shapes
from jaxpage.runner.memory import check_fits, pool_bytes, size_pool
from jaxpage.runner.program_store import NUM_BLOCKS, MeasuredSizes, ProgramStore
from jaxpage.runner.programs import compile_program, step_bytes, use_persistent_cache
from jaxpage.runner.runner import Runner
from jaxpage.tokenizer import Detokenizer, load_tokenizer
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load
from pallas_kernels.paged_attention.tpu_layout import MOST_BLOCKS

if TYPE_CHECKING:
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
    memory = (device.memory_stats() or {}).get("bytes_limit")
    draft = make_engine_spec(options, device=device, device_memory=memory)
    config, model = draft.config, draft.model
    generation_config = load_generation_config(options)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer)
    use_persistent_cache(config.compilation_cache_dir)
    if draft.no_kernel_reason:
        logger.warning("attention runs in plain XLA: %s", draft.no_kernel_reason)
    if config.load_format == "dummy":
        initialise(model, seed=config.seed)
    else:
        load(model, config.model, use_tqdm=use_tqdm)
    for reason in draft.transform_weights():
        logger.warning("products of int8 run in plain XLA: %s", reason)
    draft, runner = _make_runner(draft)
    config = draft.config
    if config.fit_max_model_len:
        _check_same_ropes(draft)
    scheduler = _make_scheduler(config, runner, tokenizer)
    logger.info("%s", config.describe())
    runner.warmup()
    engine = Engine(scheduler, runner, overlap=config.async_scheduling)
    if config.kv_offload_dir is not None:
        # Exit functions run in the reverse order of their registration: this one before jax's own.
        atexit.register(_save_prefix_cache, weakref.ref(engine))
    vocab_size = model.config.vocab_size
    eos = eos_token_ids(draft.hf_config, generation_config, tokenizer)
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


def _make_runner(draft: EngineSpec) -> tuple[EngineSpec, Runner]:
    """The runner with its pool sized, and the draft with what the sizing made of its config."""
    machine = machine_facts(draft.device, compiler_flags())
    root = programs_folder(draft.config)

    def available(temp_bytes: int) -> int:
        return pool_bytes(
            (draft.device,),
            utilization=draft.config.gpu_memory_utilization,
            temp_bytes=temp_bytes,
            share_of_free=draft.config.cache_max_entry_count,
        )

    sizes = MeasuredSizes(root, machine | draft.facts(0))
    sized, num_blocks = size_kv(draft, available, sizes)
    store = None
    if root is not None:
        store = ProgramStore(root, machine | sized.facts(num_blocks), [sized.device])
        reason = store.why_empty()
        if reason:
            logger.info("the programs in %s are not for this start: %s", root, reason)
    runner = Runner(
        sized.model,
        buckets=sized.buckets,
        pool_spec=sized.pool_of(num_blocks),
        step_spec=sized.step_spec,
        ahead_of_time=not sized.config.enforce_eager,
        host_memory=_make_host_memory(sized),
        store=store,
    )
    return sized, runner


def programs_folder(config: ResolvedConfig) -> Path | None:
    """Where compiled programs are kept; None if they are not."""
    if config.enforce_eager or not config.compilation_cache_dir:
        return None
    return Path(config.compilation_cache_dir) / "programs"


def _make_host_memory(draft: EngineSpec) -> HostMemory | None:
    """Host blocks of `swap_space`, and the store on disk behind them."""
    config, device, pool = draft.config, draft.device, draft.pool
    if config.swap_space == 0:
        return None
    num_blocks = int(config.swap_space * 2**30) // pool.bytes_per_block
    if num_blocks == 0:
        raise ValueError(
            f"swap_space={config.swap_space} GiB holds no block of {pool.bytes_per_block} bytes"
        )
    store = None
    if config.kv_offload_dir is not None:
        shapes = content_shapes(draft.pool_of(2).abstract())
        facts = [repr(draft.model.config), repr(draft.groups), repr(pool)]
        parameters = jax.tree.leaves(nnx.state(draft.model))
        folder = Path(config.kv_offload_dir) / fingerprint(facts, map(np.asarray, parameters))
        store = BlockStore(folder, [x.shape for x in shapes], [x.dtype for x in shapes])
    return HostMemory(num_blocks, device=None if device.platform == "cpu" else device, store=store)


def size_kv(
    draft: EngineSpec, available: Callable[[int], int], sizes: MeasuredSizes
) -> tuple[EngineSpec, int]:
    """The number of KV blocks, and the draft with what it makes of the two token limits. Raises ValueError.

    `available(temp_bytes)` are the bytes for the pool beside a step that needs so many: compiled to be asked, unless
    `sizes` knows it. Programs are for a number of blocks, so that of the last time is taken again if it fits and is
    not much smaller than what would.
    """
    config, bytes_per_block = draft.config, draft.pool.bytes_per_block
    footprint = draft.footprint
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None and config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
    if num_blocks is None:
        num_blocks, footprint = size_pool(
            available=available,
            temp_bytes=lambda bucket: sizes.remember(
                bucket.name, lambda: bytes_besides_pool(draft, bucket)
            ),
            bytes_per_block=bytes_per_block,
            footprint=footprint,
            max_model_len=config.max_model_len,
            must_fit=not config.fit_max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        num_blocks = sizes.settle(NUM_BLOCKS, num_blocks)
    if draft.pool.lanes:  # their kernel's block tables can name no more
        num_blocks = min(num_blocks, MOST_BLOCKS)
    max_model_len = config.max_model_len
    if config.fit_max_model_len:
        max_model_len = max(2, footprint.longest(max_model_len, num_blocks))
    # With blocks counted out by the user, the scheduler refuses the single request that is too long.
    if config.num_gpu_blocks_override is None:
        check_fits(
            footprint,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            available=num_blocks * bytes_per_block,
        )
    config = dataclasses.replace(
        config,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=footprint.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return dataclasses.replace(draft, config=config), num_blocks


def bytes_besides_pool(draft: EngineSpec, bucket: Bucket) -> int:
    """What a device must hold besides weights and pool: request state, temporaries and results of one step.

    Compiles it, with the smallest pool: its size does not matter to the temporaries.
    """
    lowerings = draft.lowerings(2, (bucket,))
    with draft.on_target():
        programs = [
            compile_program(name, lowerings.programs[name])
            for name in bucket.programs(bucket.num_rows)
        ]
    return lowerings.state_bytes + step_bytes(programs)


def _check_same_ropes(draft: EngineSpec) -> None:
    """Some RoPE types depend on max_model_len, which may have been fitted after the model was made."""
    config = draft.config
    length = config.max_model_len
    fitted = registry.build(draft.hf_config, dtype=config.dtype, max_model_len=length)
    if fitted.config.ropes != draft.model.config.ropes:
        raise ValueError(
            f'max_model_len="auto" came to {length}, and the RoPE of this model depends on it; '
            f"pass max_model_len={length}"
        )


def _make_scheduler(config: ResolvedConfig, runner: Runner, tokenizer: Any) -> Scheduler:
    def make_detokenizer(request: Request) -> Detokenizer | None:
        if tokenizer is None or not request.params.detokenize:
            return None
        return Detokenizer(tokenizer, request.params, request.prompt_token_ids)

    memory = runner.host_memory
    kv = KVCache(
        runner.pool_spec.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=runner.groups.windows,
        num_host_blocks=0 if memory is None else memory.num_blocks,
        preemption_mode=config.preemption_mode,
        store=None if memory is None else memory.store,
    )
    return Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        make_detokenizer=make_detokenizer,
    )
