"""What callers of a `Sampler` give: its options, prompts and params, checked and in one form."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import numpy as np

from jaxpage.config import EngineConfig
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.sampling_params import RequestOutputKind, SamplingParams

# Option of the engine -> why a sampler does not support it.
_NOT_FOR_TRAINING = {
    "quantization": "the parameters are the trainer's",
    "kv_offload_dir": "KV on disk would belong to weights that change",
    "runner": "a sampler generates",
}


def check_options(config: EngineConfig) -> None:
    """Raise ValueError for options that samplers do not support."""
    for name, reason in _NOT_FOR_TRAINING.items():
        if getattr(config, name) not in (None, "auto", "generate"):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not supported by samplers: {reason}; leave it out"
            )
    if config.data_parallel_size > 1 or config.nnodes > 1:
        raise ValueError(
            f"a sampler is one engine in one process, got data_parallel_size={config.data_parallel_size} and "
            f"nnodes={config.nnodes}; shard the parameters with tensor_parallel_size or mesh"
        )


def listed_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, from one or several. Ids may be in arrays."""
    prompts = plain(prompts)
    if isinstance(prompts, str | dict):
        return [prompts]
    each = [plain(prompt) for prompt in prompts]
    return [each] if each and isinstance(each[0], numbers.Integral) else each


def plain(value: Any) -> Any:
    """An array as a list, or as a number if it has no dimensions; anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray | jax.Array) else value


def group_seeds(seed: Any) -> GroupSeeds | None:
    """The seeds of one call, from its `seed`."""
    if seed is None or isinstance(seed, GroupSeeds):
        return seed
    seed = plain(seed)
    if not isinstance(seed, numbers.Integral):
        raise ValueError(
            f"seed must be an int or a GroupSeeds, got {seed!r}; all rows of a call differ by themselves"
        )
    return GroupSeeds(int(seed))


def sampling_params(
    params: SamplingParams | None, n: int | None, *, has_tokenizer: bool
) -> SamplingParams:
    """Params with what a rollout needs; `n` overrides theirs."""
    params = SamplingParams(max_tokens=None) if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"params must be one SamplingParams, for all prompts, got {type(params).__name__}; where they differ, call "
            "generate from several threads, which share steps"
        )
    return dataclasses.replace(
        params,
        n=params.n if n is None else n,
        logprobs=0,
        logprob_token_ids=None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=params.detokenize and has_tokenizer,
    )
