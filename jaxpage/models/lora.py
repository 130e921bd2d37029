"""Low-rank adapters beside linear layers: many in one batch, each token with its own.

The device has a fixed number of adapter slots, 1 .. S; slot 0 means no adapter. Each linear layer of attention and MLP
also has the weights of all slots, padded with zeros to the largest rank r. `ops.lora` multiplies them.

Knows how adapters are stored. Must not know files, or which adapter is in which slot.

Letters: S adapter slots, r rank, P projections that are joined in one layer (see `weights.transform`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpage.models.layers import Constant, Linear, param
from jaxpage.ops.implementations import Choice
from jaxpage.ops.lora import XLA, Half, LoraKernel, lora
from jaxpage.parallel.sharding import sharding

if TYPE_CHECKING:
    from jaxpage.models.decoder import CausalLM

SLOTS = "adapter slots"  # the logical axis of slots
_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),  # of latent attention
    *("gate_proj", "up_proj", "down_proj"),
    *("c_fc", "c_proj"),  # of an MLP without a gate
    # of a layer with a recurrent state
    *(f"in_proj_{part}" for part in (*"qkvzbaxBC", "dt")),
    "out_proj",
    *("fc1_latent_proj", "fc2_latent_proj"),  # around experts
)

Model = TypeVar("Model", bound=nnx.Module)


class Adapters(nnx.Module):
    """The adapters of one linear layer, in all slots: y += B A x with each token's slot."""

    def __init__(
        self,
        layer: Linear,
        parts: Mapping[str, int],
        *,
        num_slots: int,
        rank: int,
        dtype: jnp.dtype,
    ):
        """`parts`: number of outputs of each projection that the layer joins, by name; one for a plain layer."""
        self.parts, self.num_slots = tuple(parts), num_slots
        metadata = layer.weight.get_metadata()
        (out_axis, in_axis), (out_units, in_units) = metadata["axes"], metadata["units"]
        zeros, num_in = Constant(0.0), layer.shape[1]
        # Slot by slot, so that each slot is contiguous in memory.
        rows = num_slots * len(parts) * rank
        axes, units = (SLOTS, in_axis), (rows, in_units)
        self.a = param((rows, num_in), axes=axes, units=units, init=zeros, dtype=dtype)
        # One array per part, since XLA would copy a slice before its product.
        axes, units = (out_axis, SLOTS), (out_units, num_slots * rank)
        self.b = nnx.List(
            [
                param((num_out, num_slots * rank), axes=axes, units=units, init=zeros, dtype=dtype)
                for num_out in parts.values()
            ]
        )
        self.kernel = XLA
        self.slots: jax.Array | None = None  # int32[..., T], set while a step is traced

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """y float32[..., T, out] of x [..., T, in], plus the adapters; y has the outputs of all parts concatenated."""
        slots = self.slots
        assert slots is not None, "tokens have no adapter slots; see `with_adapters`"
        halves = self.a[...], [b[...] for b in self.b]
        return lora(y, x, *halves, slots, num_slots=self.num_slots, kernel=self.kernel)


def attach_adapters(
    model: CausalLM,
    *,
    num_slots: int,
    rank: int,
    mesh: Mesh | None,
    choose: Callable[[Half, Sequence[Half]], Choice[LoraKernel]] | None = None,
) -> set[str]:
    """Add empty slots to every linear layer of attention and MLP, in place; with arrays if the model has arrays.

    `choose` returns the kernel for a layer's halves; without it XLA is used. Returns the reasons why the platform's
    kernel is not used, where that is so. Call it when the weights are final (`weights.transform`).
    """
    reasons = set()
    for module, name, layer, parts in list(_linear_layers(model)):
        adapters = Adapters(layer, parts, num_slots=num_slots, rank=rank, dtype=model.config.dtype)
        if choose is not None:
            choice = choose(adapters.a.get_value(), [b.get_value() for b in adapters.b])
            adapters.kernel = choice.chosen
            reasons.add(choice.reason)
        if isinstance(layer.weight.get_value(), jax.Array):
            for variable in (adapters.a, *adapters.b):
                empty, metadata = variable.get_value(), variable.get_metadata()
                place = sharding(mesh, metadata["axes"], metadata["units"])
                variable.set_value(jnp.zeros(empty.shape, empty.dtype, device=place))
        getattr(module, name).adapters = nnx.data(adapters)
    return reasons - {None}


def _linear_layers(
    model: CausalLM,
) -> Iterator[tuple[nnx.Module, str, Linear, dict[str, int]]]:
    """(module, attribute, layer, outputs of its parts) of the layers that support adapters."""
    for _, module in nnx.iter_modules(model.model.layers):
        joined = getattr(module, "joined_projections", {})
        for name in (*joined, *_LAYERS):
            layer = getattr(module, name, None)
            if isinstance(layer, Linear):
                num_out = layer.weight.get_value().shape[0]
                yield module, name, layer, joined.get(name, {name: num_out})


def with_adapters(model: Model, slots: jax.Array | None) -> Model:
    """The model with adapters: for each token that of its slot, `slots` int32[..., T]. None: the model unchanged.

    A copy that shares the model's arrays, for one trace.
    """
    if slots is None:
        return model
    copy = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Adapters):
            module.slots = nnx.data(slots)
    return copy


# Filling a slot.


def slot_axis(variable: nnx.Variable) -> int | None:
    """The axis of a parameter that has adapter slots; None for the model's own parameters."""
    axes = variable.get_metadata().get("axes", ())
    return axes.index(SLOTS) if SLOTS in axes else None


@dataclass(frozen=True, kw_only=True)
class AdapterArray:
    """The part of one adapter in one of the model's arrays."""

    layers: tuple[str, ...]  # paths of the projections whose halves it holds, in order
    is_a: bool  # the first half (A), else the second (B)
    shape: tuple[int, int]
    dtype: np.dtype


def adapter_arrays(model: CausalLM, num_slots: int) -> list[AdapterArray]:
    """The parts for all arrays with adapter slots, in the order of the model's parameters."""
    found = []
    modules = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, Adapters)}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axis = slot_axis(variable)
        if axis is None:
            continue
        depth = path.index("adapters") + 1
        parts = modules[path[:depth]].parts
        is_a = path[depth] == "a"
        parent = ".".join(map(str, path[: depth - 2]))
        shape = list(variable.get_value().shape)
        shape[axis] //= num_slots
        found.append(
            AdapterArray(
                layers=tuple(
                    f"{parent}.{p}" for p in (parts if is_a else [parts[int(str(path[depth + 1]))]])
                ),
                is_a=is_a,
                shape=(shape[0], shape[1]),
                dtype=np.dtype(variable.get_value().dtype),
            )
        )
    return found


def write_slot(
    weights: list[jax.Array], slot: jax.Array, contents: list[jax.Array], *, axes: tuple[int, ...]
) -> list[jax.Array]:
    """The arrays with adapter slots, with new contents in one slot, 1 .. S; `axes`: the slot axis of each array."""
    return [
        jax.lax.dynamic_update_slice_in_dim(whole, part, (slot - 1) * part.shape[axis], axis)
        for whole, part, axis in zip(weights, contents, axes, strict=True)
    ]
