"""The composition root: the only module that knows everybody. From options to an engine that is ready to run."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxpage.config import (
    EngineConfig,
    ResolvedConfig,
    default_sampling,
    eos_token_ids,
    load_generation_config,
    load_hf_config,
)
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.engine import Engine
from jaxpage.engine.scheduler import Scheduler
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.runner.buckets import Bucket, make_buckets
from jaxpage.runner.memory import check_fits, pool_bytes, size_pool
from jaxpage.runner.programs import use_persistent_cache
from jaxpage.runner.runner import Runner
from jaxpage.runner.step import StepSpec
from jaxpage.tokenizer import Detokenizer, load_tokenizer
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.request import Request

logger = logging.getLogger("jaxpage")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An engine and what its users need to know of the model."""

    engine: Engine
    config: ResolvedConfig
    hf_config: PretrainedConfig
    tokenizer: Any  # of transformers; None with `skip_tokenizer_init`
    vocab_size: int
    eos_token_ids: frozenset[int]
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
    if config.load_format == "dummy":
        initialise(model, seed=config.seed)
    else:
        load(model, config.model, use_tqdm=use_tqdm)
    config, runner = _make_runner(config, model, device)
    logger.info("%s", config.describe())
    runner.warmup()
    engine = Engine(
        _make_scheduler(config, runner, tokenizer), runner, overlap=config.async_scheduling
    )
    return Built(
        engine=engine,
        config=config,
        hf_config=hf_config,
        tokenizer=tokenizer,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids(hf_config, generation_config, tokenizer),
        default_sampling=default_sampling(generation_config),
    )


def _print_unless_configured() -> None:
    """What the engine says of itself goes to stderr, unless the user has said where logs go."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def _make_runner(
    config: ResolvedConfig, model: Any, device: jax.Device
) -> tuple[ResolvedConfig, Runner]:
    """The runner with its pool sized, and the config with what the sizing decided."""

    def runner_of(config: ResolvedConfig, num_blocks: int) -> Runner:
        return Runner(
            model,
            buckets=_buckets(config),
            pool_spec=dataclasses.replace(pool, num_blocks=num_blocks),
            step_spec=_step_spec(config, model.config.vocab_size),
            ahead_of_time=not config.enforce_eager,
        )

    def available(temp_bytes: int) -> int:
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        return pool_bytes(device, utilization=config.gpu_memory_utilization, temp_bytes=temp_bytes)

    pool = KVPoolSpec(
        num_layers=model.config.num_layers,
        num_blocks=0,
        block_size=config.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=jax.numpy.dtype(config.dtype),
    )
    blocks_per_row = -(-config.max_model_len // config.block_size)

    def temp_bytes(bucket: Bucket) -> int:
        # The pool's size does not matter to the temporaries; a small one is enough to ask.
        return runner_of(config, blocks_per_row + 1).temp_bytes(bucket)

    num_blocks, max_tokens = config.num_gpu_blocks_override, config.max_num_batched_tokens
    if num_blocks is None:
        num_blocks, max_tokens = size_pool(
            available=available,
            temp_bytes=temp_bytes,
            bytes_per_block=pool.bytes_per_block,
            num_blocks_per_row=blocks_per_row,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_tokens,
        )
    max_model_len = config.max_model_len
    if config.fit_max_model_len:
        max_model_len = max(1, min(max_model_len, (num_blocks - 1) * config.block_size))
    elif config.num_gpu_blocks_override is None:
        check_fits(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            available=num_blocks * pool.bytes_per_block,
        )
    config = dataclasses.replace(
        config,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
    )
    return config, runner_of(config, num_blocks)


def _buckets(config: ResolvedConfig) -> tuple[Bucket, ...]:
    return make_buckets(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )


def _step_spec(config: ResolvedConfig, vocab_size: int) -> StepSpec:
    return StepSpec(
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        num_blocks_per_row=-(-config.max_model_len // config.block_size),
        num_slots=config.max_num_seqs + 1,
        vocab_size=vocab_size,
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
    )
    return Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        make_detokenizer=make_detokenizer,
    )
