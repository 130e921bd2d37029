"""What one pass through a model reads, multiplies and exchanges, from its shapes. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxpage.aot.attention_kinds import attention_kinds
from jaxpage.aot.experts import (
    exchange_of_experts,
    num_active,
    numbers_of,
    temp_bytes_of_experts,
)
from jaxpage.aot.pictures import ENCODER
from jaxpage.aot.recurrence import numbers_of_recurrence, temp_bytes_of_recurrence
from jaxpage.aot.steps import (
    EMBEDDING,
    exchange_of,
    most_temp_bytes,
    most_temp_bytes_of_layers,
)
from jaxpage.engine_spec import EngineSpec
from jaxpage.models.config import EagleOptions
from jaxpage.parallel.heads import share_heads
from jaxpage.pool_choice import kv_groups
from jaxpage.weights.spec import specs

HEAD = "lm_head."
_MOST_CHECKED = 512  # rows whose logits `verify` keeps, see `runner.step`


def numbers_of_model(spec: EngineSpec) -> dict[str, Any]:
    """Those of the spec's model, whatever its draft model. Bytes and flops are those of one device."""
    spec = dataclasses.replace(spec, draft_model=None)
    model, weights = spec.model.config, spec.weight_bytes
    described = specs(spec.model)
    shares_head = model.eagle is not None and not model.eagle.has_head
    has_own_head = spec.model.lm_head is not None or shares_head
    of_encoder = sum(weights[path] for path in weights if path.startswith(ENCODER))
    of_head = sum(weights[path] for path in weights if path.startswith(HEAD))
    # A step reads only a few rows of an embedding that is not tied to the head. A head may have none, and knows
    # fewer tokens.
    has_embedding = has_own_head and EMBEDDING in described
    embedding = weights[EMBEDDING] if has_embedding else 0
    num_known = model.vocab_size if model.eagle is None else model.eagle.vocab_size  # 0: shared
    head_size = num_known * model.hidden_size
    not_multiplied = math.prod(described[EMBEDDING].shape) if has_embedding else 0
    multiplied = num_active(spec.model) - not_multiplied
    return {
        "weight_bytes": sum(weights.values()),
        "bytes_per_step": sum(weights.values()) - embedding - of_encoder,
        "flops_per_token": 2 * multiplied // spec.num_devices,
        # The parts of these that only tokens need that are followed by sampled ones.
        "head_bytes": of_head if has_own_head else weights[EMBEDDING],
        "head_flops": 2 * head_size // spec.num_devices,
        "exchange": [*exchange_of(spec), *exchange_of_experts(spec)],
        "experts": numbers_of(spec),
        "layer_block_bytes": spec.block_bytes // spec.pool.num_arrays,
        # Of each KV-cache group its window and the number of layers that read it; those with less KV count less.
        "kv_groups": _kv_groups(spec),
        "attention_kinds": attention_kinds(spec),
        "recurrence": numbers_of_recurrence(spec),
    }


def _kv_groups(spec: EngineSpec) -> list[list[Any]]:
    model, groups = spec.model.config, spec.groups
    layers = dict.fromkeys(range(len(groups.windows)), 0.0)
    for layer in model.attention_layers:
        location = groups.layer_locations[model.kv_layer(layer)]
        assert location is not None
        layers[location.group] += _share_of_array(spec, layer)
    return [[window, layers[number]] for number, window in enumerate(groups.windows)]


def _share_of_array(spec: EngineSpec, layer: int) -> float:
    """The part of an array of the pool that a layer reads."""
    model, pool = spec.model.config, spec.pool
    heads = model.kv_heads(layer)
    of_layer = share_heads(model.num_heads, heads.num, spec.num_devices).of_pool * heads.head_dim
    return of_layer / (pool.num_kv_heads * pool.head_dim)


def spec_of_drafts(spec: EngineSpec) -> EngineSpec | None:
    """The draft model as if it were the model of an engine; None if there is none."""
    drafts = spec.draft_model
    if drafts is None:
        return None
    return dataclasses.replace(
        spec,
        hf_config=drafts.hf_config,
        model=drafts.model,
        # The windows that its layers read; which blocks these are does not matter here.
        groups=kv_groups(
            drafts.model.config,
            max_model_len=spec.config.max_model_len,
            num_devices=spec.num_devices,
        ),
        pool=drafts.pool,
        no_kernel_reason=drafts.no_kernel_reason,
        draft_model=None,
    )


def numbers_of_drafts(spec: EngineSpec) -> dict[str, Any] | None:
    """How many drafts a row has at most, the `forward` program of the largest step with drafts, and what a pass through
    the draft model needs, if there is one; None for an engine without drafts.
    """
    if not spec.config.num_drafts:
        return None
    own = spec_of_drafts(spec)
    model = None if own is None else numbers_of_model(own)
    if own is not None and model is not None:
        parameters = specs(own.model).values()
        model["num_parameters"] = sum(each.num_weights for each in parameters)
        model["block_bytes"] = own.block_bytes
        eagle = own.model.config.eagle
        model["kind"] = _kind(eagle)
        if eagle is not None and not eagle.has_head:
            model |= _with_head_of(model, numbers_of_model(spec))
        model["attention"] = own.attention if own.no_kernel_reason else None
    return {
        "num_tokens": spec.config.num_drafts,
        "forward": forward_of_drafts(spec),
        "model": model,
    }


def _kind(eagle: EagleOptions | None) -> str:
    """What drafts, in words."""
    if eagle is None:
        return "a model"
    return "an EAGLE head" if eagle.mtp_layer is None else "the MTP layer"


def _with_head_of(drafts: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What changes in the numbers of a head that uses the LM head of the model."""
    head = {name: model[name] for name in ("head_bytes", "head_flops")}
    return head | {
        "bytes_per_step": drafts["bytes_per_step"] + head["head_bytes"],
        "flops_per_token": drafts["flops_per_token"] + head["head_flops"],
    }


def temp_bytes_at_most(spec: EngineSpec) -> int:
    """An empirical upper bound for a step of any model on any chip, with drafts and a draft model too."""
    found = most_temp_bytes(spec) + temp_bytes_of_experts(spec) + temp_bytes_of_recurrence(spec)
    drafts = spec_of_drafts(spec)
    if drafts is not None:  # no program has the logits of both
        found += most_temp_bytes_of_layers(drafts) + temp_bytes_of_experts(drafts)
    if spec.config.num_drafts:
        rows = spec.config.max_num_seqs * (1 + spec.config.num_drafts)
        found += 2 * 4 * min(rows, _MOST_CHECKED) * spec.model.config.vocab_size
    return found


def forward_of_drafts(spec: EngineSpec) -> str:
    """The `forward` program of a step in which as many rows as possible have all their drafts."""
    config, forward = spec.config, [bucket for bucket in spec.buckets if not bucket.decode]
    num_tokens = config.max_num_seqs * (1 + config.num_drafts)
    return next((b.name for b in forward if b.num_tokens >= num_tokens), forward[-1].name)
