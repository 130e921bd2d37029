"""A draft model as shapes: a smaller model whose tokens are guesses at those of the engine's model; or an EAGLE head or
MTP layer, which guesses from hidden states of that model.

It has a KV pool of its own, whose blocks have the numbers of the engine's: whatever the model computes, the draft model
computes too, so a block that is shared, copied or found in the prefix cache is so in both pools. Its tokens are only
guesses, which the model checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import ResolvedConfig
from jaxpage.device import Device
from jaxpage.kv_groups import KVGroups, Location
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.pool_choice import choose_pool
from jaxpage.weights.abstract import abstract_model
from jaxpage.weights.head import abstract_head, abstract_mtp_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Models with the same tokenizer may pad their vocabularies differently: Qwen2.5-0.5B to 151,936 and 7B to 152,064.
_MOST_PADDING = 1024


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Where it is, and its shapes on the devices of the engine."""

    folder: str
    hf_config: PretrainedConfig
    quantization: str | None
    model: CausalLM  # abstract until weights are loaded
    pool: KVPoolSpec  # with as many blocks as the engine's
    # of each layer: (the engine's KV-cache group, array of the pool)
    layer_locations: tuple[Location, ...]
    no_kernel_reason: str | None  # like `EngineSpec.no_kernel_reason`, of its attention

    @property
    def feature_size(self) -> int:
        """Of the features that a head reads; 0: it is no head."""
        config = self.model.config
        return 0 if config.eagle is None else config.hidden_size


def make_draft_model(
    config: ResolvedConfig,
    model: ModelConfig,
    hf_config: PretrainedConfig,
    *,
    groups: KVGroups,
    hardware: Device,
    mesh: Mesh | None,
) -> DraftModel | None:
    """The draft model that the options of an engine name, if they do. model, hf_config: the engine's; groups: of its
    layers.

    Reads only config.json; of a head also which tensors there are, and which tokens it knows. Raises ValueError for a
    model that cannot guess for this one.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method == "ngram":
        return None
    # An MTP layer comes with the model.
    method, folder = speculative.method, config.draft_model or config.model
    # Quantised as its own checkpoint is, or to int8 as the model is; without a vision tower.
    quantization = config.quantization if config.quantization in ("int8", "dequantize") else None
    own = replace(
        config,
        model=folder,
        hf_config_path=None,
        quantization=quantization,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )
    with named_errors():
        if config.draft_model is not None:
            hf_config = load_hf_config(folder, None)
        if method == "mtp":
            drafts, quantization = abstract_mtp_layer(hf_config, own, model, mesh)
        elif method in ("eagle", "eagle3"):
            drafts = abstract_head(hf_config, own, model, method)
        else:
            drafts, quantization, _ = abstract_model(hf_config, own, mesh)
    _check(drafts.config, model)
    locations = _locations(drafts.config, groups, config.max_model_len)
    num_arrays = 1 + max(location.array for location in locations)
    with named_errors():
        choice = choose_pool(
            own, drafts.config, num_arrays=num_arrays, hardware=hardware, mesh=mesh
        )
    return DraftModel(
        folder=folder,
        hf_config=hf_config,
        quantization=quantization,
        model=drafts,
        pool=choice.chosen,
        layer_locations=locations,
        no_kernel_reason=choice.reason,
    )


@contextmanager
def named_errors() -> Iterator[None]:
    """In this context a ValueError says that it is about the draft model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the draft model of speculative_config: {error}") from error


def _check(drafts: ModelConfig, model: ModelConfig) -> None:
    if drafts.recurrent is not None:
        raise ValueError(
            f"{drafts.architecture} has layers with a recurrent state, which only the engine's own model may have; "
            "take one without"
        )
    if abs(drafts.vocab_size - model.vocab_size) > _MOST_PADDING:
        raise ValueError(
            f"the draft model has a vocabulary of {drafts.vocab_size:,} tokens and the model one of "
            f"{model.vocab_size:,}; both must have the same tokenizer"
        )


def _locations(drafts: ModelConfig, groups: KVGroups, max_model_len: int) -> tuple[Location, ...]:
    """(group, array) of each layer. The group's blocks must reach back as far as it sees: the first such group has the
    narrowest window. Layers of different groups share arrays, because these have different blocks.
    """
    locations: list[Location] = []
    num_layers = [0] * len(groups.windows)  # of each group
    for layer in drafts.kv_layers:
        window = drafts.windows[layer]
        seen = max_model_len if window is None else window
        reaches = [
            g for g, w in enumerate(groups.windows) if w is None or w >= min(seen, max_model_len)
        ]
        if not reaches:
            raise ValueError(
                f"layer {layer} of the draft model sees {seen} tokens, and the model keeps the KV of "
                f"{max(w for w in groups.windows if w is not None)}: take a draft model with sliding windows, or a "
                "smaller max_model_len"
            )
        # Groups of the same window are alike.
        alike = [g for g in reaches if groups.windows[g] == groups.windows[reaches[0]]]
        group = min(alike, key=num_layers.__getitem__)
        locations.append(Location(group, num_layers[group]))
        num_layers[group] += 1
    return tuple(locations)
