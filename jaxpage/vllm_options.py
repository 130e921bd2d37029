"""Engine options under the names of other engines, and those that jaxpage lacks: which values are harmless.

Knows names and values of vLLM and LMDeploy. Must not know what an option does: `EngineConfig` checks
its own. An option that jaxpage learns leaves this file.
"""

from __future__ import annotations

import difflib
from typing import Any

# Option of vLLM -> the values that change nothing. None listed: any value does, the option tunes
# something that jaxpage does not have.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1, None)
    ),
    **dict.fromkeys(("cpu_offload_gb", "long_prefill_token_threshold"), (0, None)),
    **dict.fromkeys(
        (
            "trust_remote_code",
            "enable_lora",
            "enable_prompt_embeds",
            "enable_sleep_mode",
            "enable_expert_parallel",
            "disable_sliding_window",
        ),
        (False, None),
    ),
    **dict.fromkeys(
        (
            "speculative_config",
            "speculative_model",
            "num_speculative_tokens",
            "revision",
            "tokenizer_revision",
            "code_revision",
            "hf_token",
            "logits_processors",
            "pooler_config",
            "structured_outputs_config",
            "mm_processor_kwargs",
            "limit_mm_per_prompt",
            "kv_transfer_config",
            "rope_scaling",
            "rope_theta",
            "additional_config",
        ),
        (None,),
    ),
    "enable_chunked_prefill": (True, None),
    "tokenizer_mode": ("auto", "hf"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "task": ("auto", "generate"),
    "distributed_executor_backend": (None, "uni"),
    "allowed_local_media_path": ("", None),
    **dict.fromkeys(
        (
            "disable_log_stats",
            "disable_custom_all_reduce",
            "max_seq_len_to_capture",
            "use_v2_block_manager",
            "compilation_config",
            "attention_config",
            "served_model_name",
        ),
        (),
    ),
}
ADVICE = {
    "rope_scaling": '; use hf_overrides={"rope_parameters": ...}',
    "rope_theta": '; use hf_overrides={"rope_parameters": {"rope_theta": ...}}',
    "enable_chunked_prefill": "; long prompts are always split to fit max_num_batched_tokens",
    "hf_token": "; models are read from local folders",
    "revision": "; models are read from local folders",
}
# LMDeploy's `quant_policy` -> the `kv_cache_dtype` that it means, the name proper first.
QUANT_POLICY = {
    0: ("auto",),
    4: ("int4",),
    8: ("int8",),
    16: ("fp8_e4m3", "fp8"),
    17: ("fp8_e5m2",),
}


def translate(options: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The `options` under the names of `known`, without those that change nothing.

    Raises ValueError for options that jaxpage lacks at values that would change something, and for
    contradictions; TypeError for names that nobody knows.
    """
    ours = {name: value for name, value in options.items() if name in known}
    for name, value in options.items():
        if name == "quant_policy":
            ours["kv_cache_dtype"] = _kv_cache_dtype(value, options.get("kv_cache_dtype"))
        elif name == "kv_offloading_size":
            ours["swap_space"] = value or 0.0
        elif name not in known:
            _check_harmless(name, value, known)
    return ours


def _kv_cache_dtype(quant_policy: Any, given: str | None) -> str:
    """What `quant_policy` means; `given` is the `kv_cache_dtype` given besides, if any."""
    if quant_policy not in QUANT_POLICY:
        choices = ", ".join(map(str, QUANT_POLICY))
        raise ValueError(f"quant_policy must be one of {choices}, got {quant_policy!r}")
    names = QUANT_POLICY[quant_policy]
    if given is not None and given not in names:
        raise ValueError(
            f"quant_policy={quant_policy} means kv_cache_dtype={names[0]!r}, but "
            f"kv_cache_dtype={given!r} was given too; leave one of them out"
        )
    return names[0]


def _check_harmless(name: str, value: Any, known: set[str]) -> None:
    if name not in NOT_SUPPORTED:
        close = difflib.get_close_matches(name, [*known, *NOT_SUPPORTED], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise TypeError(f"unknown engine option {name!r}{hint}")
    neutral = NOT_SUPPORTED[name]
    if neutral and value not in neutral:
        raise ValueError(
            f"{name}={value!r} is not supported; leave it out, or give "
            f"{' or '.join(map(repr, neutral))}{ADVICE.get(name, '')}"
        )
