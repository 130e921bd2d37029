"""Engine options of vLLM that jaxpage lacks: which values are harmless, and what else to do.

Data only, for `EngineConfig.from_options`; an option that jaxpage learns leaves this file.
"""

from __future__ import annotations

from typing import Any

# Option of vLLM -> the values that change nothing. None listed: any value does, the option tunes
# something that jaxpage does not have.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1, None)
    ),
    **dict.fromkeys(("swap_space", "cpu_offload_gb", "long_prefill_token_threshold"), (0, None)),
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
            "kv_offloading_size",
            "kv_transfer_config",
            "rope_scaling",
            "rope_theta",
            "additional_config",
        ),
        (None,),
    ),
    "kv_cache_dtype": ("auto",),
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
