"""The shapes of an engine, from config.json alone: all that its programs depend on.

Knows the shapes of model, pool and steps on one device, or on the devices of a mesh, which may be a compile-only
topology. Must not know where weights come from, how many blocks fit, or when programs are compiled.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.device import Device
from jaxpage.draft_model import DraftModel, make_draft_model
from jaxpage.kernel_choice import Kernels
from jaxpage.kv_groups import KVGroups
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.models.taps import residual_points
from jaxpage.ops import attention
from jaxpage.pictures.border import PictureProcessor
from jaxpage.pool_choice import choose_pool, kv_groups
from jaxpage.recurrent_state import choose_kernel, num_cached_states, with_recurrent_state
from jaxpage.research_config import ResearchConfig, ResearchSpec
from jaxpage.runner.buckets import Bucket, make_buckets
from jaxpage.runner.encoder import make_picture_spec
from jaxpage.runner.lowering import Lowerings, num_bytes
from jaxpage.runner.memory import SequenceFootprint, total_ram
from jaxpage.runner.spec import PictureSpec, StepSpec
from jaxpage.runner.strict import check_strict
from jaxpage.sampling.features import processors_of
from jaxpage.weights.abstract import abstract_model
from jaxpage.weights.quantization import Quantization
from jaxpage.weights.spec import ParamSpec, specs
from jaxpage.weights.transform import ROUNDED

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Prompt tokens scored at a time: 39 MB of logits for a vocabulary of 152 k, whatever the length of the prompt.
_MOST_SCORED = 64


class LoadedModel(NamedTuple):
    """A model of an engine, and what its parameters are loaded from."""

    model: CausalLM
    folder: str
    hf_config: PretrainedConfig
    quantization: str | None
    rounds: bool  # whether floats are rounded to it after loading


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Model, pool and steps of an engine as shapes.

    `composition.size` replaces `pool` by a pool with blocks, and `config` by one with the token limits that these
    allow. The KV groups stay the same.
    """

    config: ResolvedConfig
    hf_config: PretrainedConfig
    device: jax.Device  # one of the mesh's, if there is a mesh: all are of one kind
    hardware: Device  # properties of that device
    mesh: Mesh | None  # None: `device` alone
    model: CausalLM  # abstract until weights are loaded
    quantised: Quantization | None  # its layers that compute with a checkpoint's quantised weights
    groups: KVGroups
    pool: KVPoolSpec  # num_blocks=0 until it is sized
    no_kernel_reason: str | None  # why attention runs in XLA, if a kernel exists for it
    draft_model: DraftModel | None = None
    num_cached_states: int = 0  # recurrent states in the prefix cache

    @property
    def attention(self) -> str:
        """Which one serves, in one line, and why no kernel does."""
        if self.config.numerics == "strict":
            return 'plain XLA: numerics="strict" has no kernel'
        return attention.describe(self.pool.attention, self.no_kernel_reason)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return (self.device,) if self.mesh is None else tuple(self.mesh.devices.flat)

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this host."""
        if self.mesh is None or self.config.nnodes == 1:
            return self.devices
        return tuple(self.mesh.local_devices)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def footprint(self) -> SequenceFootprint:
        """What a sequence needs from the pool."""
        return SequenceFootprint(
            windows=self.groups.windows,
            block_size=self.config.block_size,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The padded sizes of steps."""
        config = self.config
        return make_buckets(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )

    @cached_property
    def step_spec(self) -> StepSpec:
        config, model = self.config, self.model.config
        size, experts, counts = model.vocab_size, model.experts, config.record_expert_load
        return StepSpec(
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            num_blocks_per_row=config.blocks_per_row,
            groups=self.groups,
            num_slots=config.max_num_seqs + 1,
            vocab_size=size,
            hidden_size=model.hidden_size,
            dtype=model.dtype,
            decode_steps=config.decode_steps,
            num_drafts=config.num_drafts,
            has_draft_model=self.draft_model is not None,
            feature_size=self.draft_model.feature_size if self.draft_model else 0,
            num_top_logprobs=size if config.max_logprobs == -1 else min(config.max_logprobs, size),
            logprobs_mode=config.logprobs_mode,
            num_scored=min(_MOST_SCORED, self.buckets[-1].num_rows),
            processors=processors_of(config),
            prompt_embeds=config.enable_prompt_embeds,
            pictures=self.picture_spec,
            recurrent=model.recurrent,
            state_kernel=choose_kernel(model, self.hardware, num_devices=self.num_devices).chosen,
            num_cached_states=self.num_cached_states,
            num_adapters=config.max_loras if config.enable_lora else 0,
            expert_load=(len(experts.layers), experts.num_experts) if counts and experts else None,
            research=self.research,
            strict=config.numerics == "strict",
        )

    @cached_property
    def research(self) -> ResearchSpec | None:
        """What requests may capture and change inside the model."""
        research, model = self.config.research, self.model.config
        if research is None:
            return None
        assert isinstance(research, ResearchConfig)
        return ResearchSpec(
            points=residual_points(model, research.points),
            captures=residual_points(model, research.captures),
            max_interventions=research.max_interventions,
            hidden_size=model.hidden_size,
        )

    @cached_property
    def picture_spec(self) -> PictureSpec | None:
        """The encoder and its cache, for models that take pictures."""
        config, model = self.config, self.model.config
        if model.vision is None:
            return None
        return make_picture_spec(
            model.vision,
            row_bytes=model.vision.embedding_size * jnp.dtype(model.dtype).itemsize,
            cache_bytes=config.mm_encoder_cache_bytes,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            has_positions=any(rope.sections is not None for rope in model.ropes),
        )

    def picture_processor(self, tokenizer: Any) -> PictureProcessor | None:
        """Prepares pictures, for models that take them. Raises ValueError."""
        config = self.config
        if self.model.config.vision is None:
            return None
        folder = config.hf_config_path or config.model
        options = config.mm_processor_kwargs
        return registry.picture_processor(
            self.hf_config, folder, tokenizer=tokenizer, options=options
        )

    @property
    def pools(self) -> list[KVPoolSpec]:
        """The pool of the model, and of the draft model."""
        return [self.pool, *([self.draft_model.pool] if self.draft_model else [])]

    @property
    def models(self) -> list[LoadedModel]:
        """The model, and the draft model."""
        config, drafts = self.config, self.draft_model
        method = config.quantization
        rounds = self.quantised is None and method in ROUNDED
        found = [LoadedModel(self.model, config.model, self.hf_config, method, rounds)]
        if drafts is not None:
            method, rounds = drafts.quantization, drafts.quantization == "int8"
            found.append(LoadedModel(drafts.model, drafts.folder, drafts.hf_config, method, rounds))
        return found

    @property
    def kernels(self) -> Kernels:
        """Which kernels serve the models' weights."""
        return Kernels(self.hardware, self.mesh, self.model.config.dtype)

    def transform_weights(self, *, join: bool = True) -> set[str]:
        """Join and quantize the models' parameters in place, arrays or shapes, choose kernels, and add parameters for
        adapters. Call once, before `lowerings`. `join=False` keeps parameters apart, as trainers do.

        Returns lines that say which products run in plain XLA although a kernel exists, and why.
        """
        config, kernels = self.config, self.kernels
        # No kernel of floats has a gradient, which trainers and researchers need, and strict steps need XLA's sums.
        floats = join and config.numerics != "strict" and config.research is None
        lines = set[str]()
        for each in self.models:
            how = {"rounds": each.rounds, "join": join, "floats": floats}
            lines |= kernels.transform(each.model, each.quantization, **how)
        if config.enable_lora:
            sizes = {"num_slots": config.max_loras, "rank": config.max_lora_rank}
            lines |= kernels.attach_adapters(self.model, **sizes)
        return lines

    def with_blocks(self, num_blocks: int) -> EngineSpec:
        """The same with a pool of `num_blocks` blocks."""
        drafts = self.draft_model
        if drafts is not None:
            drafts = replace(drafts, pool=replace(drafts.pool, num_blocks=num_blocks))
        return replace(self, pool=replace(self.pool, num_blocks=num_blocks), draft_model=drafts)

    @property
    def num_blocks_given(self) -> int | None:
        """The blocks of the pool that the user requested; None: as many as fit."""
        config = self.config
        if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes // self.block_bytes
        return config.num_gpu_blocks_override

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on one device, in all pools."""
        num_bytes = sum(pool.bytes_per_block for pool in self.pools)
        return num_bytes // (self.num_devices if self.pool.sharded else 1)

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of each parameter on one device, by path; those of a draft model begin with "draft_model."."""
        found = specs(self.model)
        if self.draft_model is not None:
            of_drafts = specs(self.draft_model.model)
            found = found | {f"draft_model.{path}": each for path, each in of_drafts.items()}
        return {path: bytes_on_one_device(each, self.mesh) for path, each in found.items()}

    def lowerings(self, buckets: tuple[Bucket, ...] = ()) -> Lowerings:
        """The programs of these buckets, by default of its own. Lower them inside `on_target`."""
        return Lowerings(
            self.model,
            buckets=buckets or self.buckets,
            pool_spec=self.pool,
            step_spec=self.step_spec,
            moves_blocks=self.config.swap_space > 0,
            mesh=self.mesh,
            draft_model=self.draft_model,
        )

    def on_target(self) -> AbstractContextManager[Any]:
        """A context in which Pallas lowers for the chip of the mesh instead of this machine."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def fingerprint(self) -> dict[str, str]:
        """Name -> text of all that its programs depend on except the machine; see `runner.program_store`."""
        parameters, drafts = _described(self.model), self.draft_model
        facts = {
            "model": repr(self.model.config),
            "parameters": parameters,
            "KV pool": repr(self.pool),
            "steps": repr(self.step_spec),
            "rows": str(self.buckets[-1].num_rows),
            "moves blocks": str(self.config.swap_space > 0),
            # An executable is bound to its devices.
            "devices": ", ".join(str(device.id) for device in self.devices),
        }
        if drafts is not None:
            facts["draft model"] = repr(drafts.model.config)
            facts["parameters of the draft model"] = _described(drafts.model)
            facts["KV pool of the draft model"] = f"{drafts.pool!r} {drafts.layer_locations}"
        if self.config.nnodes > 1:
            facts["host"] = str(jax.process_index())
        return facts


def make_engine_spec(
    options: EngineConfig,
    *,
    device: jax.Device,
    device_memory: int | None = None,
    mesh: Mesh | None = None,
) -> EngineSpec:
    """The spec for these options. Reads only config.json, unless the model must be downloaded. Raises ValueError for
    what is not supported.

    `device_memory`: bytes of the device, None: ask the device; `mesh`: devices of the same kind as `device`.
    """
    options = options.with_local_files(weights=False)
    hardware = Device.of(device, memory_bytes=device_memory)
    hf_config = load_hf_config(options.hf_config_path or options.model, options.hf_overrides)
    registry.family(hf_config)  # an unknown architecture is reported before missing fields
    config = options.resolve(
        hf_config,
        platform=hardware.platform,
        device_kind=hardware.kind,
        device_memory=hardware.memory_bytes,
    )
    model, quantization, quantised = abstract_model(hf_config, config, mesh)
    num_devices = 1 if mesh is None else mesh.size
    memory = {
        "device_bytes": hardware.memory_bytes or total_ram(),
        "num_devices": num_devices,
    }
    config = with_recurrent_state(
        replace(config, quantization=quantization),
        model.config,
        num_seqs=options.max_num_seqs,
        **memory,
    )
    if config.numerics == "strict":
        check_strict(config, model.config, hardware.platform)
    if config.record_expert_load and model.config.experts is None:
        raise ValueError(
            "record_expert_load=True counts the tokens of experts, and "
            f"{model.config.architecture} has none: leave it out"
        )
    if config.enable_prompt_embeds and model.config.gemma4 and model.config.gemma4.per_layer_size:
        raise ValueError(
            f"enable_prompt_embeds=True: {model.config.architecture} has an embedding of each token for each layer "
            "too, and prompts of embeddings do not say of which token; leave it out"
        )
    if config.research is not None:
        _check_research(config, model, mesh)
    groups = kv_groups(model.config, max_model_len=config.max_model_len, num_devices=num_devices)
    where: dict[str, Any] = {"hardware": hardware, "mesh": mesh}
    choice = choose_pool(config, model.config, num_arrays=groups.num_arrays, **where)
    return EngineSpec(
        config=config,
        hf_config=hf_config,
        device=device,
        hardware=hardware,
        mesh=mesh,
        model=model,
        quantised=quantised,
        groups=groups,
        pool=choice.chosen,
        no_kernel_reason=choice.reason,
        draft_model=make_draft_model(config, model.config, hf_config, groups=groups, **where),
        num_cached_states=num_cached_states(config, model.config, **memory),
    )


def _check_research(config: ResolvedConfig, model: CausalLM, mesh: Mesh | None) -> None:
    """Raises ValueError for engines that do not support it, and for points that the model does not have."""
    assert isinstance(config.research, ResearchConfig)
    lacking = {
        'numerics="strict"': config.numerics == "strict",
        "enable_lora=True": config.enable_lora,
        "models that take pictures": model.config.vision is not None,
        f"{mesh.size if mesh else 1} devices": mesh is not None and mesh.size > 1,
    }
    for what, is_so in lacking.items():
        if is_so:
            raise ValueError(f"research={config.research!r} is not supported with {what}")
    residual_points(model.config, (*config.research.points, *config.research.captures))


def bytes_on_one_device(parameter: ParamSpec, mesh: Mesh | None) -> int:
    """Bytes of a parameter's share, if it is divided over a mesh."""
    shape = parameter.sharding(mesh).shard_shape(parameter.shape)
    return num_bytes(jax.ShapeDtypeStruct(shape, parameter.dtype))


def _described(model: CausalLM) -> str:
    """A hash of its parameters' paths, shapes and dtypes."""
    parameters = [f"{path}: {x.shape} {x.dtype}" for path, x in specs(model).items()]
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16]
