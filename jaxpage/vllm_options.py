"""Engine options under the names of other engines, and those that jaxpage lacks: which values are harmless.

Knows names and values of vLLM (0.32, and what older scripts still give) and of LMDeploy. Must not know what an option
does: `EngineConfig` checks its own. An option that jaxpage learns leaves this file.

None and empty values ({}, [], "") always mean that nothing was asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from jaxpage.reasoning import with_parser

# What to do instead -> option -> the values that ask for nothing. Others are refused.
_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "one process computes the model, on as many devices as tensor_parallel_size and data_parallel_size say": {
        "pipeline_parallel_size": (1,),
        "data_parallel_size_local": (1,),
        **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), (1,)),
        **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank"), (0,)),
        **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), (False,)),
        **dict.fromkeys(("data_parallel_multi_port_external_lb", "enable_hc_sp"), (False,)),
        **dict.fromkeys(("enable_elastic_ep", "enable_eplb"), (False,)),
        "enable_expert_parallel": (False, True),  # devices that share weights always share experts
        **dict.fromkeys(("enable_dbo", "enable_ep_weight_filter", "dcp_q_replicate"), (False,)),
        **dict.fromkeys(("enable_batch_sharded_sampling", "worker_use_ray"), (False,)),
        **dict.fromkeys(("data_parallel_address", "data_parallel_rpc_port"), ()),
        "distributed_executor_backend": ("uni", "mp"),
        "ubatch_size": (0,),
        "_api_process_count": (1,),
        "_api_process_rank": (0,),
    },
    "bind the process from outside, with numactl": {
        "numa_bind": (False,),
        **dict.fromkeys(("numa_bind_nodes", "numa_bind_cpus"), ()),
    },
    "choose the device with CUDA_VISIBLE_DEVICES, TPU_VISIBLE_DEVICES or JAX_PLATFORMS": {
        "device_ids": (),
        "device": ("auto",),
    },
    "give lora_request with each request": {"default_mm_loras": ()},
    'pass speculative_config={"model": NAME, "num_speculative_tokens": 4}, or "method": "ngram" and no model': {
        **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), ()),
        **dict.fromkeys(("speculative_model", "num_speculative_tokens"), ()),
        **dict.fromkeys(("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"), ()),
    },
    "every token is computed by the model itself": {
        **dict.fromkeys(("diffusion_config", "engram_config"), ()),
    },
    "config.json says how weights are quantised; "
    'linear layers can be rounded with quantization="int8", the KV cache with kv_cache_dtype': {
        "quantization_config": (),
        "allow_deprecated_quantization": (False,),
        "kv_cache_dtype_skip_layers": (),
    },
    "outputs are those of jaxpage's own verbs": {"io_processor_plugin": ()},
    "prompts are text, token ids, embeddings or pictures": {
        "enable_mm_embeds": (False,),
        "mm_encoder_only": (False,),
    },
    "KV stays in this process": {
        **dict.fromkeys(("kv_transfer_config", "kv_events_config", "ec_transfer_config"), ()),
        "kv_offloading_backend": ("native",),
    },
    "assign to the parameters of the model, which every step reads": {"weight_transfer_config": ()},
    "every engine can sleep": {"enable_sleep_mode": (False, True)},
    "host memory holds KV only, see swap_space": {
        "cpu_offload_gb": (0,),
        "offload_group_size": (0,),
    },
    "long prompts are always split to fit max_num_batched_tokens": {
        "enable_chunked_prefill": (True,),
        "long_prefill_token_threshold": (0,),
        "long_prefill_token_threshold_adaptive": (False,),
    },
    "use max_num_batched_tokens": {"max_num_scheduled_tokens": ()},
    "use max_num_seqs": {"max_num_active_seqs": ()},
    "requests wait for as long as it takes": {
        **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), ()),
    },
    "use scheduling_policy": {"scheduler_cls": ()},
    "set max_model_len to the length of the window": {"disable_sliding_window": (False,)},
    "models are implemented in jaxpage; see README for which": {
        "model_impl": ("auto", "vllm"),
        "model_class_overrides": (),
    },
    "the folder of a checkpoint has all that is read": {
        "config_format": ("auto", "hf"),
        "model_weights": (),
        "model_loader_extra_config": (),
    },
    "Hugging Face's fast tokenizers are used": {"tokenizer_mode": ("auto", "hf")},
    "outputs have tokens, text and logprobs only": {
        "enable_return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "aux_output_config": (),
        "watermark_config": (),
    },
    "prompts are not logged; outputs have them": {
        "enable_log_requests": (False,),
        "disable_log_requests": (True, False),
    },
    "noise is drawn in float32": {"use_fp64_gumbel": (False,)},
    "give ids in prompt_token_ids, and skip_tokenizer_init=True": {"tokens_only": (False,)},
    "there are no workers": {
        "worker_cls": ("auto",),
        "worker_extension_cls": (),
        "enable_fault_tolerance": (False,),
        "enable_trace_replay": (False,),
    },
    'use hf_overrides={"rope_parameters": ...}': {"rope_scaling": ()},
    'use hf_overrides={"rope_parameters": {"rope_theta": ...}}': {"rope_theta": ()},
}
_ADVICE = {name: advice for advice, options in _REFUSED.items() for name in options}
_NEUTRAL = {name: neutral for options in _REFUSED.values() for name, neutral in options.items()}

# Options that tune what jaxpage does not have -> vLLM's default. Any value is accepted; others than
# the default are told at start-up.
_WITHOUT_EFFECT: dict[str, Any] = {
    # CUDA graphs, kernels and compilers: XLA compiles everything, jaxpage chooses its kernels.
    **dict.fromkeys(("compilation_config", "attention_config", "kernel_config"), None),
    **dict.fromkeys(("cudagraph_capture_sizes", "max_cudagraph_capture_size"), None),
    **dict.fromkeys(("max_seq_len_to_capture", "max_context_len_to_capture"), None),
    **dict.fromkeys(("attention_backend", "ir_op_priority", "enable_flashinfer_autotune"), None),
    **dict.fromkeys(("disable_cascade_attn", "gdn_prefill_backend"), None),
    **dict.fromkeys(("kda_prefill_backend", "kda_decode_backend"), None),
    **dict.fromkeys(("moe_backend", "linear_backend", "sparse_indexer_topk_backend"), "auto"),
    "optimization_level": 2,
    "performance_mode": "balanced",
    "kv_sharing_fast_prefill": False,
    "swa_bounded_replay": True,
    # State-space models.
    **dict.fromkeys(("mamba_config", "mamba_block_size", "mamba_ssu_algorithm"), None),
    **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype"), "auto"),
    "mamba_cache_mode": "none",
    "mamba_backend": "triton",
    "mamba_cache_philox_rounds": 0,
    "enable_mamba_shared_prefix_checkpoint": False,
    "enable_mamba_cache_stochastic_rounding": False,
    "replayssm_buffer_len": 16,
    "use_replayssm": False,
    # How several processes talk to each other.
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    **dict.fromkeys(("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), None),
    **dict.fromkeys(("dcp_comm_backend", "cp_kv_cache_interleave_size", "eplb_config"), None),
    **dict.fromkeys(("disable_nccl_for_dp_synchronization", "elastic_ep_max_dp_size"), None),
    **dict.fromkeys(("max_parallel_loading_workers", "fault_tolerance_config"), None),
    **dict.fromkeys(("disable_custom_all_reduce", "enable_shm_tensor_arena"), False),
    **dict.fromkeys(("enable_nccl_comm_suspend", "ray_workers_use_nsight"), False),
    "dcp_kv_cache_interleave_size": 1,
    "data_parallel_backend": "mp",
    "all2all_backend": "allgather_reducescatter",
    "expert_placement_strategy": "linear",
    "dp_sync_interval": 16,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "shutdown_timeout": 0,
    # Scheduling and caching by other means.
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "watermark": 0.0,
    "disable_hybrid_kv_cache_manager": False,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "prefix_match_unit": None,
    "use_v2_block_manager": None,
    "num_lookahead_slots": 0,
    # Images, sounds, adapters, grammars: of no use without what is refused above or per request.
    "media_io_kwargs": None,
    **dict.fromkeys(("mm_encoder_attn_backend", "mm_encoder_attn_dtype"), None),
    **dict.fromkeys(("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"), None),
    **dict.fromkeys(("video_pruning_rate", "ec_manager_config"), None),
    **dict.fromkeys(("language_model_only", "interleave_mm_strings", "skip_mm_profiling"), False),
    **dict.fromkeys(("disable_chunked_mm_input", "enable_mm_processor_stats"), False),
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_hasher_algorithm": "blake3",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_tp_mode": "weights",
    "mm_encoder_fp8_scale_save_margin": 1.5,
    "video_pruning_method": "evs",
    "mm_tensor_ipc": "direct_rpc",
    "mm_processor_device": "auto",
    "mm_ipc_gpu_memory_gb": 0,
    "mm_device_do_normalize": True,
    "renderer_num_workers": 1,
    **dict.fromkeys(("lora_target_modules", "max_lora_cls_labels"), None),
    **dict.fromkeys(("fully_sharded_loras", "enable_tower_connector_lora"), False),
    **dict.fromkeys(("specialize_active_lora", "enable_mixed_moe_lora_format"), False),
    "enable_moe_shared_loras": False,
    "lora_dtype": "auto",
    **dict.fromkeys(("guided_decoding_backend", "reasoning_parser_plugin"), None),
    # Weights in other places.
    **dict.fromkeys(("cpu_offload_params", "offload_params"), None),
    "offload_backend": "auto",
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "enable_cumem_allocator": False,
    "sleep_mode_offload_cudagraph": False,
    "sleep_preserve_parameter_names": None,
    "safetensors_load_strategy": None,
    "safetensors_prefetch_num_threads": 8,
    "safetensors_prefetch_block_size": 16 * 2**20,
    "pt_load_map_location": "cpu",
    "ignore_patterns": ["original/**/*"],
    "code_revision": None,
    # Names and logs of a server.
    **dict.fromkeys(("served_model_name", "additional_config", "profiler_config"), None),
    **dict.fromkeys(("logging_config", "log_level", "log_config_file"), None),
    **dict.fromkeys(("show_hidden_metrics_for_version", "otlp_traces_endpoint"), None),
    **dict.fromkeys(("collect_detailed_traces", "custom_histogram_buckets"), None),
    **dict.fromkeys(("disable_log_stats", "aggregate_engine_logging"), False),
    **dict.fromkeys(("kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics"), False),
    **dict.fromkeys(("enable_layerwise_nvtx_tracing", "enable_logging_iteration_details"), False),
    **dict.fromkeys(("jit_monitor_verbose", "fail_on_environ_validation"), False),
    "per_request_spec_decode_metrics": "none",
    "kv_cache_metrics_sample": 0.01,
    "jit_monitor_mode": "warn",
    # Code of a checkpoint is never run; where it is needed, loading the model says so.
    "trust_remote_code": False,
}

# Older vLLM's `task` -> what it says now.
_TASKS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("auto", "generate"), {}),
    **dict.fromkeys(("embed", "embedding"), {"runner": "pooling", "convert": "embed"}),
    "classify": {"runner": "pooling", "convert": "classify"},
    **dict.fromkeys(("score", "reward"), {"runner": "pooling"}),
}
# All that `translate` knows besides jaxpage's own, `reasoning_parser` excepted.
NAMES = {*_NEUTRAL, *_WITHOUT_EFFECT, "quant_policy", "task", "kv_offloading_size"}
# LMDeploy's `quant_policy` -> the `kv_cache_dtype` that it means, the name proper first.
QUANT_POLICY = {
    0: ("auto",),
    4: ("int4",),
    8: ("int8",),
    16: ("fp8_e4m3", "fp8"),
    17: ("fp8_e5m2",),
}


def translate(options: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The `options` under the names of `known`, and the names of those that have no effect.

    None of a known option means its default. Raises ValueError for options that jaxpage lacks at
    values that ask for something, and for contradictions; TypeError for names that nobody knows.
    """
    known = set(known)
    ours = {name: value for name, value in options.items() if name in known and value is not None}
    without_effect = []
    for name, value in options.items():
        if name == "quant_policy":
            if value is not None:
                ours["kv_cache_dtype"] = _kv_cache_dtype(value, options.get("kv_cache_dtype"))
        elif name == "task":
            if value not in (None, *_TASKS):
                raise ValueError(f"task must be one of {', '.join(_TASKS)}, got {value!r}")
            ours |= _TASKS[value or "auto"]
        elif name == "kv_offloading_size":
            if value is not None:
                ours["swap_space"] = value
        elif name == "reasoning_parser":
            if value:
                config = options.get("reasoning_config")
                ours["reasoning_config"] = with_parser(config, value)
        elif name in _WITHOUT_EFFECT:
            if not _asks_for_nothing(value, (_WITHOUT_EFFECT[name],)):
                without_effect.append(name)
        elif name in _NEUTRAL:
            check_neutral(name, value, _NEUTRAL[name], _ADVICE[name])
        elif name not in known:
            _refuse_unknown(name, known)
    return ours, without_effect


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


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    is_empty = isinstance(value, dict | list | tuple | set | str) and not value
    return value is None or is_empty or value in neutral


def check_neutral(name: str, value: Any, neutral: tuple[Any, ...], advice: str) -> None:
    """Raise ValueError for a value that asks for something; `advice` says what to do instead."""
    if not _asks_for_nothing(value, neutral):
        harmless = f", or give {' or '.join(map(repr, neutral))}" if neutral else ""
        raise ValueError(
            f"{name}={value!r} is not supported: {advice}. Leave the option out{harmless}"
        )


def neutral_values(name: str) -> tuple[Any, ...]:
    """Those of an option of NAMES that ask for nothing, besides None and empty ones."""
    return _NEUTRAL.get(name) or tuple(
        value for value in (_WITHOUT_EFFECT.get(name),) if value is not None
    )


def _refuse_unknown(name: str, known: set[str]) -> None:
    close = difflib.get_close_matches(name, [*known, *_NEUTRAL, *_WITHOUT_EFFECT], n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise TypeError(f"unknown engine option {name!r}{hint}")


def refuse(**options: Any) -> None:
    """Raise ValueError for arguments of vLLM's methods that are accepted only when unset."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported; leave it None")
