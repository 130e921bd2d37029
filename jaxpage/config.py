"""Every option of the engine, and how defaults are resolved for a machine and a model.

Knows option names (vLLM's), their ranges and defaults. Must not know jax: platform and memory are arguments.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.checkpoint_config import CheckpointValues
from jaxpage.default_sizes import BLOCK_SIZES, batch_limits
from jaxpage.environment import resolve_cache_dir
from jaxpage.hub import is_url, local_folder, small_files
from jaxpage.pictures.options import check_picture_options, most_of
from jaxpage.reasoning import ReasoningConfig, to_reasoning_config, with_parser
from jaxpage.research_config import ResearchConfig, to_research_config
from jaxpage.sampling.processors import check_processors
from jaxpage.speculation import SpeculativeConfig, to_speculative_config
from jaxpage.structured_outputs.config import StructuredOutputsConfig, to_structured_outputs_config
from jaxpage.tool_parsers import formats
from jaxpage.vllm_options import translate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_KV_CACHE_FORMATS = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
QUANTIZATION_METHODS = (
    *("awq", "gptq", "fp8", "compressed-tensors"),
    *("awq_marlin", "gptq_marlin"),  # vLLM's names of kernels for the first two
    *("fp8_per_tensor", "fp8_per_channel"),  # its names of "fp8" for weights of floats
)
_LOGPROBS_MODES = {
    "raw": "raw",
    "raw_logprobs": "raw",
    "temperature": "temperature",
    "processed": "processed",
    "processed_logprobs": "processed",
    "raw_logits": "raw_logits",
    "processed_logits": "processed_logits",
}
_CHOICES = {
    "dtype": ("auto", *_DTYPES),
    "kv_cache_dtype": ("auto", *_KV_CACHE_FORMATS, *_DTYPES),
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("None", "recompute", "swap"),
    "quantization": ("None", "int8", "dequantize", *QUANTIZATION_METHODS),
    "tool_call_parser": ("None", *formats.NAMES),
    "load_format": ("auto", "safetensors", "dummy"),
    "logprobs_mode": tuple(_LOGPROBS_MODES),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "numerics": ("fast", "strict"),
}
_RANGES = {  # inclusive
    "block_size": (1, 4096),
    "num_gpu_blocks_override": (2, 2**31 - 1),  # the null block and one more
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 2**20),
    "decode_steps": (1, 1024),
    "max_logprobs": (-1, 2**20),
    **dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "nnodes"), (1, 4096)),
    "stream_interval": (1, 2**31 - 1),
    "node_rank": (0, 4095),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 256),
    "max_cpu_loras": (1, 2**20),
}
_NO_MODEL = "model must be a folder or a name on the Hugging Face hub, got {!r}"
_PATHS = (
    *("model", "tokenizer", "hf_config_path", "chat_template", "record_calls"),
    "allowed_local_media_path",
)
_EMPTY = (  # where {} or "" means None
    *("hf_overrides", "override_generation_config", "allowed_local_media_path"),
    *("limit_mm_per_prompt", "mm_processor_kwargs"),
)
_FLAGS = (
    "skip_tokenizer_init",
    "enable_prefix_caching",
    "async_scheduling",
    "enforce_eager",
    "use_tqdm_on_load",
    "enable_lora",
    "record_expert_load",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options given by the user; `resolve` decides the rest. Raises ValueError for bad values."""

    model: str  # a checkpoint folder, or a name on the Hugging Face hub, see `hub.local_folder`
    # "auto": the checkpoint's, but bfloat16 instead of float32, and on TPUs always; or float16, bfloat16, float32
    dtype: str = "auto"
    # None: as the checkpoint is; "int8": round weights and activations of linear layers and experts; "fp8": round their
    # weights, if they are floats; "dequantize": compute with floats; or the name of the checkpoint's own quantization
    quantization: str | None = None
    # "auto": as `dtype`; or int8, int4, fp8_e4m3 ("fp8"), fp8_e5m2
    kv_cache_dtype: str = "auto"
    # None: the model's limit; "auto": the longest that fits the KV memory; "8k", "8K" work too
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None  # sequences in one step; None: depends on the platform
    max_num_batched_tokens: int | None = None  # tokens in one step; None: depends on the platform
    gpu_memory_utilization: float = 0.92  # share of the device's memory to use, (0, 1]
    cache_max_entry_count: float | None = None  # LMDeploy's: share of what the weights leave
    kv_cache_memory_bytes: int | str | None = None  # None: measured; "2G" works too
    num_gpu_blocks_override: int | None = None  # None: measured
    block_size: int | None = None  # tokens; None: 16 on CPU, 64 on GPU, 128 on TPU
    enable_prefix_caching: bool = True
    seed: int = 0  # for requests without a seed
    chat_template: str | None = None  # a file or the template; None: the tokenizer's
    tokenizer: str | None = None  # a folder or a name on the hub; None: the model's
    hf_config_path: str | None = None  # config.json and tokenizer for a model that has weights only
    revision: str | None = None  # branch, tag or commit of a model on the hub; None: main
    tokenizer_revision: str | None = None  # None: `revision`
    download_dir: str | None = None  # cache of models from the hub; None: Hugging Face's
    hf_token: bool | str | None = field(default=None, repr=False)  # for gated models
    skip_tokenizer_init: bool = False  # no tokenizer: ids in, ids out
    # devices that share weights and KV heads; None: one, or all local ones if the weights do not fit on one
    tensor_parallel_size: int | None = None
    # replicas of the engine, each on as many devices of its own; see `engine.replicas`
    data_parallel_size: int = 1
    mesh: Any = None  # a `jax.sharding.Mesh` whose devices to use, all for tensor parallelism
    nnodes: int = 1  # hosts, each running a process with the same options
    node_rank: int = 0  # of this host, from 0; with `dist_init_addr`
    # "HOST:PORT" of host 0, to which the others connect; None: jax finds it and the ranks, as on TPU VMs
    dist_init_addr: str | None = None
    swap_space: float = 0.0  # GiB of host blocks, for swapping and the prefix cache's second tier
    preemption_mode: str | None = None  # "recompute" or "swap"; None: swap only if n > 1
    kv_offload_dir: str | None = None  # folder of the third tier, for evicted host blocks
    scheduling_policy: str = "fcfs"  # or "priority": lower values first
    async_scheduling: bool = True  # launch a step before the previous one was read
    decode_steps: int = 8  # decode steps in one launch
    # check guesses at several tokens in one step; a dict becomes a SpeculativeConfig. None: off
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    stream_interval: int = 1  # least tokens between two outputs of a sequence
    load_format: str = "auto"  # "auto" and "safetensors" read the checkpoint, "dummy" is random
    # merged into config.json, nested dicts too; or a function from the config to another one
    hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None
    # default sampling and extra EOS ids: "auto": the model's file; "vllm": neutral; or a folder
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    # markers of reasoning, for `thinking_token_budget`; a dict becomes a ReasoningConfig
    reasoning_config: ReasoningConfig | dict[str, Any] | None = None
    # limits and defaults of `structured_outputs`; a dict becomes a StructuredOutputsConfig
    structured_outputs_config: StructuredOutputsConfig | dict[str, Any] | None = None
    # format of the model's tool calls, see `jaxpage.tool_parsers`; None: from its chat template
    tool_call_parser: str | None = None
    # cached executables; None: $JAXPAGE_COMPILATION_CACHE_DIR or ~/.cache/jaxpage/xla; "off": none
    compilation_cache_dir: str | None = None
    enable_prompt_embeds: bool = False  # prompts may be {"prompt_embeds": array [T, E]}
    # most pictures and videos in a prompt: {"image": 4, "video": 1}; None: 999 of each
    limit_mm_per_prompt: dict[str, Any] | None = None
    # how pictures are prepared, overriding the checkpoint: {"max_pixels": 1003520}
    mm_processor_kwargs: dict[str, Any] | None = None
    # device memory for encoded pictures; None: 256 MB, less if prompts are short; "2G" works too
    mm_encoder_cache_bytes: int | str | None = None
    allowed_local_media_path: str | None = None  # folder below which file: URLs may be read
    allowed_media_domains: tuple[str, ...] = ()  # hosts from which pictures may be fetched
    # write every launch to this file, see `jaxpage replay`; it has the token ids of prompts and answers, but no text
    record_calls: str | None = None
    enforce_eager: bool = False  # compile a program at its first use, not before the first request
    # largest `logprobs` of a request, besides -1, which means all; -1: the size of the vocabulary
    max_logprobs: int = 20
    # what logprobs are computed from: or "temperature", "processed", "raw_logits", "processed_logits"
    logprobs_mode: str = "raw"
    # "strict": the bits of logprobs do not depend on the batch, and a trainer can reproduce them; slower
    numerics: str = "fast"
    # custom parts of the sampler, compiled into every step: `jaxpage.sampling.fields.SamplerFeature`s
    logits_processors: tuple[Any, ...] = ()
    runner: str = "auto"  # or "generate", or "pooling": vectors of texts, see `jaxpage.pooling`
    convert: str = "auto"  # how to pool with a generative model: "embed", "classify" or "none"
    pooler_config: Any = None  # a `PoolerConfig` or a dict; None: as the checkpoint says
    enable_lora: bool = False  # allow requests with a `lora_request`
    max_loras: int = 1  # most adapters in one batch; requests with others wait
    max_lora_rank: int = 16  # largest rank of an adapter
    max_cpu_loras: int | None = None  # adapters kept in host memory; None: max_loras
    record_expert_load: bool = False  # count the tokens of each expert, for `stats()`
    research: ResearchConfig | dict[str, Any] | None = None  # what requests may capture and change
    use_tqdm_on_load: bool = True  # show a progress bar while weights are loaded
    # Names of options that were given but have no effect here; logged at start-up.
    options_without_effect: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            object.__setattr__(self, name, _dtype_name(getattr(self, name)))
        for name in _PATHS:
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name in _EMPTY:
            if getattr(self, name) in ({}, ""):
                object.__setattr__(self, name, None)
        object.__setattr__(self, "allowed_media_domains", tuple(self.allowed_media_domains))
        object.__setattr__(self, "logits_processors", check_processors(self.logits_processors))
        self._convert_parts()
        if not isinstance(self.model, str):
            raise ValueError(_NO_MODEL.format(self.model))
        for name, choices in _CHOICES.items():
            value = str(getattr(self, name))
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and low <= value <= high):
                raise ValueError(f"{name} must be an int in {low}..{high}, got {value!r}")
        for name in ("gpu_memory_utilization", "cache_max_entry_count"):
            share = getattr(self, name)
            if share is not None and not (_is_number(share) and 0 < share <= 1):
                raise ValueError(f"{name} must be in (0, 1], got {share!r}")
        if not (_is_number(self.swap_space) and 0 <= self.swap_space < 2**20):
            raise ValueError(f"swap_space must be a number of GiB, got {self.swap_space!r}")
        self._check_combinations()
        self._check_hosts()
        if not _is_int(self.seed):
            raise ValueError(f"seed must be an int, got {self.seed!r}")
        if self.max_model_len not in (None, "auto", -1):
            _parse_count("max_model_len", self.max_model_len)
        for name in ("kv_cache_memory_bytes", "mm_encoder_cache_bytes"):
            if getattr(self, name) is not None:
                _parse_count(name, getattr(self, name))
        check_picture_options(
            self.limit_mm_per_prompt, self.mm_processor_kwargs, self.allowed_media_domains
        )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not (
            self.hf_overrides is None
            or isinstance(self.hf_overrides, dict)
            or callable(self.hf_overrides)
        ):
            raise ValueError(f"hf_overrides must be a dict or callable, got {self.hf_overrides!r}")
        if not isinstance(given := self.override_generation_config, dict | None):
            raise ValueError(f"override_generation_config must be a dict, got {given!r}")

    def _convert_parts(self) -> None:
        """Turn dicts into the configs that they stand for."""
        reasoning = to_reasoning_config(self.reasoning_config)
        if self.structured_outputs_config is not None:
            structured = to_structured_outputs_config(self.structured_outputs_config)
            kept = None if structured == StructuredOutputsConfig() else structured
            object.__setattr__(self, "structured_outputs_config", kept)
            if structured.reasoning_parser and not (reasoning and reasoning.reasoning_parser):
                reasoning = with_parser(reasoning, structured.reasoning_parser)
        object.__setattr__(self, "reasoning_config", reasoning)
        speculative = to_speculative_config(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        object.__setattr__(self, "research", to_research_config(self.research))

    def _check_hosts(self) -> None:
        address, port = (self.dist_init_addr or "host:1").rpartition(":")[::2]
        if not (address and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"dist_init_addr must be HOST:PORT, got {self.dist_init_addr!r}")
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank={self.node_rank} is not below nnodes={self.nnodes}; ranks begin with 0"
            )
        if self.node_rank and self.dist_init_addr is None:
            raise ValueError("node_rank needs dist_init_addr; without it jax finds the ranks")
        if self.nnodes > 1 and self.kv_offload_dir is not None:
            raise ValueError(f"kv_offload_dir works on one host, not with nnodes={self.nnodes}")
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} works on one host, not with nnodes={self.nnodes}"
            )

    def _check_combinations(self) -> None:
        if self.cache_max_entry_count is not None and self.gpu_memory_utilization != 0.92:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} is a share of all memory, "
                "cache_max_entry_count of what the weights leave free; give one of them"
            )
        if self.swap_space == 0 and (self.preemption_mode == "swap" or self.kv_offload_dir):
            needs = "preemption_mode='swap'" if self.preemption_mode == "swap" else "kv_offload_dir"
            raise ValueError(f"{needs} needs host blocks; give swap_space too, in GiB")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}"
            )
        for name in ("mesh", "record_calls") if self.data_parallel_size > 1 else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is for one engine, but data_parallel_size={self.data_parallel_size}; leave one of them "
                    "out. Each replica takes tensor_parallel_size of the local devices, in their order"
                )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """The config for keyword arguments of vLLM, or LMDeploy's `quant_policy`.

        Options of vLLM that jaxpage lacks are accepted with neutral values. Raises ValueError for other values of them,
        TypeError for unknown names.
        """
        if not options.get("model"):
            raise ValueError(_NO_MODEL.format(options.get("model")))
        known = [f.name for f in dataclasses.fields(EngineConfig)]
        ours, without_effect = translate(options, known)
        given = tuple(ours.pop("options_without_effect", ()))
        return cls(**ours, options_without_effect=(*given, *without_effect))

    def with_local_files(self, *, weights: bool = True) -> EngineConfig:
        """The same with local folders instead of names on the hub, downloaded if necessary. Raises ValueError.

        Without `weights` only the small files are needed.
        """
        options: dict[str, Any] = {"download_dir": self.download_dir, "token": self.hf_token}
        needs = weights and self.load_format != "dummy"
        model = local_folder(
            "model", self.model, revision=self.revision, needs_weights=needs, **options
        )
        hf_config_path = self.hf_config_path
        if hf_config_path is not None or is_url(model):
            hf_config_path = small_files(hf_config_path or model, **options)
        tokenizer = self.tokenizer
        if tokenizer is not None and not self.skip_tokenizer_init:
            revision = self.tokenizer_revision or self.revision
            options |= {"revision": revision, "needs_weights": False}
            tokenizer = local_folder("tokenizer", tokenizer, **options)
        speculative = self.speculative_config
        if isinstance(speculative, SpeculativeConfig):
            speculative = speculative.with_local_files(**options | {"needs_weights": needs})
        return dataclasses.replace(
            self,
            model=model,
            hf_config_path=hf_config_path,
            tokenizer=tokenizer,
            speculative_config=speculative,
        )

    @property
    def takes_pictures(self) -> bool:
        """Whether prompts may have pictures, if the model supports them."""
        return most_of(self.limit_mm_per_prompt, "image") > 0

    def resolve(
        self,
        hf_config: PretrainedConfig,
        *,
        platform: str,
        device_kind: str = "",
        device_memory: int | None = None,
    ) -> ResolvedConfig:
        """The config with every default resolved for this model and this machine.

        `platform` is jax's ("cpu", "gpu", "tpu"), `device_kind` jax's name of a device, `device_memory` its bytes.
        Raises ValueError if `max_model_len` exceeds the model's limit.
        """
        if platform not in BLOCK_SIZES:
            raise ValueError(f"platform must be one of {', '.join(BLOCK_SIZES)}, got {platform!r}")
        default_seqs, default_tokens = batch_limits(platform, device_kind, device_memory)
        max_model_len = self._resolve_max_model_len(hf_config)
        max_num_seqs = self.max_num_seqs or default_seqs
        # No step needs more tokens than all sequences at full length, and each sequence needs at least one.
        default_tokens = max(min(default_tokens, max_num_seqs * max_model_len), max_num_seqs)
        dtype = _resolve_dtype(self.dtype, hf_config, platform)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(EngineConfig)}
        without_effect = self.options_without_effect
        if platform == "cpu" and self.gpu_memory_utilization != 0.92:
            without_effect += ("gpu_memory_utilization",)
        values |= {
            "options_without_effect": without_effect,
            "tokenizer": self.tokenizer or self.hf_config_path or self.model,
            "dtype": dtype,
            "kv_cache_dtype": _resolve_kv_cache_dtype(self.kv_cache_dtype, dtype),
            "max_model_len": max_model_len,
            "fit_max_model_len": self.max_model_len in ("auto", -1),
            "block_size": self.block_size or BLOCK_SIZES[platform],
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes
            and _parse_count("kv_cache_memory_bytes", self.kv_cache_memory_bytes),
            "mm_encoder_cache_bytes": self.mm_encoder_cache_bytes
            and _parse_count("mm_encoder_cache_bytes", self.mm_encoder_cache_bytes),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens or default_tokens,
            "compilation_cache_dir": resolve_cache_dir(self.compilation_cache_dir),
            "logprobs_mode": _LOGPROBS_MODES[self.logprobs_mode],
            "max_cpu_loras": self.max_cpu_loras or self.max_loras,
        }
        if self.speculative_config is not None:  # drafts follow from all tokens so far
            values |= {"async_scheduling": False, "decode_steps": 1}
        return ResolvedConfig(**values)

    def _resolve_max_model_len(self, hf_config: PretrainedConfig) -> int:
        limit = _model_len_limit(hf_config)
        if self.max_model_len in (None, "auto", -1):
            if limit is None:
                raise ValueError(
                    "config.json does not say how long a sequence may be; set max_model_len"
                )
            return limit
        wanted = _parse_count("max_model_len", self.max_model_len)
        if wanted < 2:
            raise ValueError("max_model_len must be at least 2: a token of prompt, one of answer")
        if limit is not None and wanted > limit:
            raise ValueError(
                f"max_model_len={wanted} exceeds the {limit} positions of config.json; lower it, "
                'or extend the model with hf_overrides={"rope_parameters": ...}'
            )
        return wanted


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig, CheckpointValues):
    """An EngineConfig with all defaults resolved; options that stay None are off, or have no effect here.

    `compilation_cache_dir` is "" if there is no cache, `dtype` one of float16, bfloat16, float32, and
    `kv_cache_dtype` either the same or one of int8, int4, fp8_e4m3, fp8_e5m2.
    """

    tokenizer: str = field()
    max_model_len: int = field()
    block_size: int = field()
    kv_cache_memory_bytes: int | None = None
    mm_encoder_cache_bytes: int | None = None
    speculative_config: SpeculativeConfig | None = None
    max_num_seqs: int = field()
    max_num_batched_tokens: int = field()
    compilation_cache_dir: str = field()
    fit_max_model_len: bool = False  # lower `max_model_len` to what fits the KV memory

    @property
    def blocks_per_row(self) -> int:
        """Entries in a row of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def draft_model(self) -> str | None:
        """The folder of the draft model, if there is one."""
        return self.speculative_config.model if self.speculative_config else None

    @property
    def num_drafts(self) -> int:
        """The most tokens of a sequence that are guessed in one step."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    def describe(self) -> str:
        """One line per option, for the debug log."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}
        width = max(map(len, values))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype of NumPy, jax or torch, or given as a str."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    try:
        return str(dtype) if dtype is None else np.dtype(dtype).name
    except TypeError:
        return str(dtype).removeprefix("torch.")


def _resolve_dtype(dtype: str, hf_config: PretrainedConfig, platform: str) -> str:
    if dtype != "auto":
        return _DTYPES[dtype]
    text_config = hf_config.get_text_config()
    stored = getattr(text_config, "dtype", None) or getattr(hf_config, "dtype", None) or "float32"
    stored = _DTYPES.get(str(stored).removeprefix("torch."), "float32")
    # The matrix units of TPUs do not take float16.
    return "bfloat16" if stored == "float32" or platform == "tpu" else stored


def _resolve_kv_cache_dtype(kv_cache_dtype: str, dtype: str) -> str:
    if kv_cache_dtype in _KV_CACHE_FORMATS:
        return _KV_CACHE_FORMATS[kv_cache_dtype]
    if kv_cache_dtype != "auto" and _DTYPES[kv_cache_dtype] != dtype:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} is not the {dtype} that the model computes in; give "
            f"{', '.join(_KV_CACHE_FORMATS)} to save memory, or leave it out"
        )
    return dtype


def _model_len_limit(hf_config: PretrainedConfig) -> int | None:
    """The number of positions that the model supports after RoPE scaling, counted as vLLM does."""
    text = hf_config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    limit = next((n for name in names if (n := getattr(text, name, None))), None)
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if limit is None or not factor or kind in ("default", "llama3", "longrope", "su"):
        return limit  # for these, config.json has the length after scaling
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or limit) * factor)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _parse_count(name: str, value: Any) -> int:
    """A positive int; as in vLLM, "8k" is 8000, "8K" is 8192, "1.5k" is 1500."""
    if _is_int(value) and 0 < value < 2**63:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value) if isinstance(value, str) else None
    if match:
        digits, unit = match.groups()
        power = " kmgt".index(unit.lower()) if unit else 0
        count = float(digits) * (1024 if unit.isupper() else 1000) ** power
        if count == int(count) > 0:
            return int(count)
    raise ValueError(f'{name} must be a positive int, or one like "8k" or "8K", got {value!r}')
