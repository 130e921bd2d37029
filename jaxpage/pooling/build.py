"""From options to a ready pooling model: the composition root of models that do not generate.

As in `jaxpage.build`, everything that can be refused by reading small files is refused before the weights are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.device import Device
from jaxpage.environment import compiler_flags
from jaxpage.hub import display_name
from jaxpage.models import pooling_registry
from jaxpage.models.pooling_model import LinearHead, PoolingModel, Projection
from jaxpage.models.pooling_registry import Architecture
from jaxpage.models.sources import Naming
from jaxpage.pooling.choose import read_architecture
from jaxpage.pooling.chunks import NO_CHUNKS, Chunks, make_chunks
from jaxpage.pooling.engine import PoolingEngine
from jaxpage.pooling.inputs import PoolingInputs
from jaxpage.pooling.params import PoolerConfig, to_pooler_config
from jaxpage.pooling.pooler import Activation, ModelInfo, Pooler, sigmoid, softmax
from jaxpage.pooling.rows import Size, make_sizes
from jaxpage.pooling.sentence_transformers import (
    Dense,
    SentenceTransformer,
    has_modules,
    read_sentence_transformer,
)
from jaxpage.runner.fingerprint import machine_fingerprint
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import use_persistent_cache
from jaxpage.start_up_log import log_options_without_effect, print_unless_configured
from jaxpage.tokenizer import load_tokenizer
from jaxpage.weights.dummy import initialise
from jaxpage.weights.find_quantized import with_quantized
from jaxpage.weights.load import load, quantization_config_of
from jaxpage.weights.quantization import quantization_of
from jaxpage.weights.quantized_layers import forget
from jaxpage.weights.safetensors import open_checkpoint
from jaxpage.weights.spec import specs, variables

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("jaxpage")

# Options that pooling models do not support -> their neutral value.
_NEUTRAL: dict[str, Any] = {
    "quantization": None,
    "tensor_parallel_size": None,
    "data_parallel_size": 1,
    "nnodes": 1,
    "mesh": None,
    "record_calls": None,
    "logits_processors": (),
    "kv_offload_dir": None,
    "record_expert_load": False,
    "research": None,
    "numerics": "fast",
}


@dataclass(frozen=True, kw_only=True)
class BuiltPooler:
    """A pooling model, ready."""

    engine: PoolingEngine
    pooler: Pooler
    config: ResolvedConfig
    tokenizer: Any  # of transformers; None with `skip_tokenizer_init`


def build_pooler(options: EngineConfig, *, use_tqdm: bool = True) -> BuiltPooler:
    """Read the checkpoint, and start compiling. Raises ValueError for what cannot be served."""
    print_unless_configured()
    start = time.perf_counter()
    options = _checked(options).with_local_files()
    folder = Path(options.model)
    hf_config, found = read_architecture(options)
    modules = read_sentence_transformer(folder)
    pooler_config = to_pooler_config(options.pooler_config)
    device = jax.local_devices()[0]
    hardware = Device.of(device)
    from_tokens = getattr(hf_config, "classifier_from_token", None)
    if from_tokens and found.is_encoder:
        raise ValueError("classifier_from_token is for decoders: encoders have no head for tokens")
    model, naming, config = _shapes(options, hf_config, found, modules, hardware)
    model.config = dataclasses.replace(
        model.config,
        pooling=pooler_config.sequence_pooling or modules.pooling or model.config.pooling,
    )
    _check_pooling(model)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer)
    if tokenizer is not None:
        tokenizer.truncation_side = "right"  # as vLLM does for pooling models
    use_persistent_cache(config.compilation_cache_dir)
    _fill(model, naming, config, hf_config, use_tqdm)
    if from_tokens:
        _attach_token_head(model, folder, tokenizer, hf_config)
    _attach_projections(model, modules.dense)
    info = _model_info(hf_config, found, model, modules, pooler_config, folder)
    inputs = PoolingInputs(
        tokenizer,
        config,
        modules,
        vocab_size=model.config.vocab_size,
        joins_pairs=getattr(hf_config, "use_sep_token", not from_tokens),
    )
    sizes, chunks = sizes_of(config, model, hardware)
    engine = PoolingEngine(
        model,
        sizes=sizes,
        chunks=chunks,
        store=_store(config, model, device, chunks),
        ahead_of_time=not config.enforce_eager,
        per_token=info.tasks[0].startswith("token_"),
    )
    _log(config, model, device, info, seconds=time.perf_counter() - start)
    return BuiltPooler(
        engine=engine, pooler=Pooler(inputs, info), config=config, tokenizer=tokenizer
    )


def sizes_of(
    config: ResolvedConfig, model: PoolingModel, hardware: Device
) -> tuple[tuple[Size, ...], Chunks]:
    """Sizes of launches, and chunks for longer texts. A model whose tokens see later ones has no chunks."""
    max_len, max_tokens = config.max_model_len, config.max_num_batched_tokens
    if not model.config.is_causal:
        return make_sizes(max_len=max_len, max_tokens=max_tokens), NO_CHUNKS
    sizes = make_sizes(max_len=min(max_len, max_tokens), max_tokens=max_tokens)
    longest = max(size.length for size in sizes)
    return sizes, make_chunks(
        model, hardware, num_tokens=longest, max_len=max_len, block_size=config.block_size
    )


def _checked(options: EngineConfig) -> EngineConfig:
    for name, neutral in _NEUTRAL.items():
        value = getattr(options, name)
        if value != neutral and (name, value) != ("tensor_parallel_size", 1):
            raise ValueError(
                f"{name}={value!r} is not supported by pooling models; leave it {neutral!r}"
            )
    return options


def _shapes(
    options: EngineConfig,
    hf_config: PretrainedConfig,
    found: Architecture,
    modules: SentenceTransformer,
    hardware: Device,
) -> tuple[PoolingModel, Naming, ResolvedConfig]:
    """The abstract model, its naming, and the resolved options."""
    with_head = not getattr(hf_config, "classifier_from_token", None)

    def resolve(options: EngineConfig) -> ResolvedConfig:
        return options.resolve(
            hf_config,
            platform=hardware.platform,
            device_kind=hardware.kind,
            device_memory=hardware.memory_bytes,
        )

    config = resolve(options)

    def build(config: ResolvedConfig) -> tuple[PoolingModel, Naming]:
        return pooling_registry.build(
            hf_config,
            found,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            with_head=with_head,
        )

    model, naming = build(config)
    # Some position tables start at an offset, and sentence-transformers may set a lower limit.
    is_given = options.max_model_len not in (None, "auto", -1)
    longest = model.config.longest
    if is_given and config.max_model_len > longest:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the model's limit of {longest} tokens; lower it"
        )
    if not is_given:
        wanted = min(modules.max_seq_length or longest, longest)
        config = resolve(dataclasses.replace(options, max_model_len=wanted))
        model, naming = build(config)
    return model, naming, config


def _check_pooling(model: PoolingModel) -> None:
    config = model.config
    if config.is_causal and config.pooling == "CLS":
        raise ValueError(
            f"{config.architecture} is causal: the first token sees no other, so pooling type CLS is meaningless; "
            'use "LAST" or "MEAN"'
        )


def _fill(
    model: PoolingModel,
    naming: Naming,
    config: ResolvedConfig,
    hf_config: PretrainedConfig,
    use_tqdm: bool,
) -> None:
    if config.load_format == "dummy":
        initialise(model, seed=config.seed)
    else:
        load(
            model,
            config.model,
            use_tqdm=use_tqdm and config.use_tqdm_on_load,
            naming=naming,
            hf_config=hf_config,
        )


def _attach_token_head(
    model: PoolingModel, folder: Path, tokenizer: Any, hf_config: PretrainedConfig
) -> None:
    """Attach a head of rows of the language-model head, one for each token of `classifier_from_token`.

    For Qwen3-Reranker's "no" and "yes" it has one label, their difference, whose sigmoid is the softmax of "yes".
    """
    words = list(getattr(hf_config, "classifier_from_token", ()))
    if tokenizer is None:
        raise ValueError(
            "classifier_from_token needs a tokenizer; leave out skip_tokenizer_init=True"
        )
    ids = tokenizer.convert_tokens_to_ids(words)
    wrong = [w for w, i in zip(words, ids, strict=True) if i in (None, tokenizer.unk_token_id)]
    if wrong or len(words) < 2:
        raise ValueError(
            f"classifier_from_token must be at least two tokens of the vocabulary, got {words}"
        )
    is_reranker = bool(getattr(hf_config, "is_original_qwen3_reranker", False))
    if is_reranker and len(words) != 2:
        raise ValueError(f"is_original_qwen3_reranker needs two tokens, got {words}")
    quantization = quantization_of(quantization_config_of(hf_config))
    stored = with_quantized(open_checkpoint(folder), quantization)
    names = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    tensor = next((stored[name] for name in names if name in stored), None)
    if tensor is None:
        raise ValueError(f"classifier_from_token: {folder} has none of {', '.join(names)}")
    rows = [tensor.read((slice(i, i + 1),)).astype(np.float32) for i in ids]
    forget()
    weight = rows[1] - rows[0] if is_reranker else np.concatenate(rows)
    config = dataclasses.replace(model.config, num_labels=len(weight))
    head = LinearHead(config, bias=False)
    head.out.weight.set_value(jax.device_put(weight))
    model.config, model.head = config, nnx.data(head)


def _attach_projections(model: PoolingModel, modules: tuple[Dense, ...]) -> None:
    """Attach the Dense modules of sentence-transformers, which follow the pooling."""
    size = model.config.hidden_size
    for module in modules:
        if module.size_in != size:
            raise ValueError(
                f"{module.folder} expects {module.size_in} inputs, but gets {size}; correct its config.json"
            )
        size = module.size_out
    found = [_projection(module) for module in modules]
    model.projections = nnx.List(found)


def _projection(module: Dense) -> Projection:
    projection = Projection(
        module.size_in, module.size_out, bias=module.has_bias, activation=module.activation
    )
    stored = open_checkpoint(module.folder)
    for path, variable in variables(projection).items():
        tensor, wanted = stored.get(path), variable.get_value().shape
        if tensor is None or tensor.shape != wanted:
            raise ValueError(f"{module.folder}/model.safetensors has no {path} of shape {wanted}")
        variable.set_value(jax.device_put(tensor.read().astype(np.float32)))
    return projection


def _model_info(
    hf_config: PretrainedConfig,
    found: Architecture,
    model: PoolingModel,
    modules: SentenceTransformer,
    pooler: PoolerConfig,
    folder: Path,
) -> ModelInfo:
    config = model.config
    tasks = {
        "embed": ("embed", "token_embed"),
        "classify": ("classify", "token_classify"),
        "token_classify": ("token_classify",),
    }[found.does]
    if model.head is None and found.does != "embed":
        raise ValueError(f"{found.name} has no classification head")
    size = config.num_labels
    if found.does == "embed":
        size = modules.dense[-1].size_out if modules.dense else config.hidden_size
    sizes = getattr(hf_config, "matryoshka_dimensions", None)
    matryoshka = None if sizes is None else tuple(sizes)
    if sizes is None and getattr(hf_config, "is_matryoshka", False):
        matryoshka = ()
    labels: Mapping[int, str] = getattr(hf_config, "id2label", None) or {}
    return ModelInfo(
        name=found.name,
        tasks=tasks,
        size=size,
        pooler=pooler,
        normalizes=modules.normalizes if has_modules(folder) else True,
        activation=_activation(hf_config, found, size),
        labels=dict(labels),
        matryoshka=matryoshka,
        step_tag_id=pooler.step_tag_id,
    )


def _activation(hf_config: PretrainedConfig, found: Architecture, num_labels: int) -> Activation:
    """As the config says, else sigmoid for one class and softmax for several; a single reward has no activation."""
    if found.is_reward:
        return np.array if num_labels == 1 else softmax
    problem = getattr(hf_config, "problem_type", None)
    if problem in ("regression", "multi_label_classification"):
        return np.array if problem == "regression" else sigmoid
    named = (getattr(hf_config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(hf_config, "sbert_ce_default_activation_function", None)
    if named:
        name = str(named).rpartition(".")[2]
        if name not in ("Sigmoid", "Identity"):
            raise ValueError(
                f"config.json has the activation {named!r}; supported are Sigmoid, Identity"
            )
        return sigmoid if name == "Sigmoid" else np.array
    return sigmoid if num_labels == 1 else softmax


def _store(
    config: ResolvedConfig, model: PoolingModel, device: jax.Device, chunks: Chunks
) -> ProgramStore | None:
    """Where the model's executables are cached."""
    if config.enforce_eager or not config.compilation_cache_dir:
        return None
    parameters = [f"{path}: {x.shape} {x.dtype}" for path, x in specs(model).items()]
    fingerprint = machine_fingerprint(device, compiler_flags()) | {
        "model": repr(model.config),
        "parameters": hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16],
        "chunks": repr(chunks),
        "projections": repr([projection.activation for projection in model.projections]),
        "devices": str(device.id),
    }
    return ProgramStore(Path(config.compilation_cache_dir) / "programs", fingerprint, (device,))


def _log(
    config: ResolvedConfig,
    model: PoolingModel,
    device: jax.Device,
    info: ModelInfo,
    *,
    seconds: float,
) -> None:
    num = sum(int(np.prod(each.shape)) for each in specs(model).values())
    logger.debug("%s", config.describe())
    logger.info(
        "model     %s (%s), %.3g M parameters in %s",
        display_name(config.model),
        info.name,
        num / 1e6,
        config.dtype,
    )
    logger.info("device    %s", device.device_kind)
    logger.info(
        "pooling   %s of texts of at most %d tokens, by %s; %d numbers",
        info.tasks[0],
        config.max_model_len,
        model.config.pooling,
        info.size,
    )
    log_options_without_effect(config)
    logger.info("ready     after %.1f s", seconds)
