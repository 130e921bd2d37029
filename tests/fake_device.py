"""What `build` returns, around a device that is fake: the scheduler, the tokenizer and the options are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine.engine import Engine
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.replicas import Replicas
from jaxpage.engine.scheduler import Scheduler
from tests.fakes import FakeFieldsEngine, FakeRunner

EOS = 2
MAX_MODEL_LEN = 64
NUM_BLOCKS = 400


def fake_built(
    folder: str,
    hf_config: Any,
    tokenizer: Any,
    *,
    default_sampling=None,
    fail_collect=(),
    num_replicas: int = 1,
    hosts=None,
    **options,
) -> Any:
    """`fail_collect`: see `FakeRunner`, of the first replica; `hosts`: the other ones; `options` are the engine's."""
    options = {"model": folder, "max_model_len": MAX_MODEL_LEN, "block_size": 4} | options
    config = EngineConfig(**options).resolve(hf_config, platform="cpu")
    engines = [
        _fake_engine(config, fail_collect if number == 0 else ()) for number in range(num_replicas)
    ]
    return SimpleNamespace(
        engine=engines[0] if num_replicas == 1 else Replicas(engines),
        runners=[engine.runner for engine in engines],
        config=config,
        hf_config=hf_config,
        tokenizer=None if config.skip_tokenizer_init else tokenizer,
        vocab_size=512,
        eos_token_ids=(EOS,),
        default_sampling=default_sampling or {},
        has_recurrent_state=False,
        picture_processor=None,
        hosts=hosts,
        adapters=None,
        research=None,
        memory=None,
    )


def _fake_engine(config: ResolvedConfig, fail_collect: tuple[int, ...]) -> Engine:
    scheduler = Scheduler(
        KVCache(NUM_BLOCKS, 4, enable_prefix_caching=True),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
    )
    runner = FakeRunner(NUM_BLOCKS, 4, fail_collect=fail_collect)
    return FakeFieldsEngine(scheduler, runner, overlap=config.async_scheduling)
