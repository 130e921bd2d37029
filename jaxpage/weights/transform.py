"""Transformations of weights that the engine loaded itself: join projections with the same input, round to int8 or fp8,
choose kernels for linear layers and experts. Weights may be quantized already, see `quantized_layers`.

A trainer's model is never changed: its parameters are used as they are. Knows the modules of the decoder; must not know
checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.decoder import CausalLM
from jaxpage.models.experts import Experts, MixtureOfExperts
from jaxpage.models.layers import Embedding, Linear
from jaxpage.ops.embedding import LookupKernel
from jaxpage.ops.experts import ExpertsKernel, Weights
from jaxpage.ops.implementations import Choice
from jaxpage.ops.matmul import MatmulKernel
from pallas_kernels.quant_matmul import quantized
from pallas_kernels.quant_matmul.quantized import QuantizedWeight

# Returns the kernel for a weight, given the axes and units of its data.
ChooseQuantized = Callable[
    [QuantizedWeight, tuple[str, ...], tuple[int, ...]], Choice[MatmulKernel]
]

_SUBLANES = 8  # rows of a register of a TPU
_OF_RECURRENT_LAYERS = "in_proj"  # what their joined projections begin with
ROUNDED = {"int8": "int8", "fp8": "fp8_e4m3"}  # quantization -> the format that it rounds floats to


@partial(jax.jit, static_argnames="format")
def _rounded(weight: jax.Array, format: str) -> QuantizedWeight:
    """[F, E], or [X, F, E] of experts"""
    to_format = partial(quantized.quantize, format=format)
    return to_format(weight) if weight.ndim == 2 else jax.vmap(to_format)(weight)


def join_projections(model: CausalLM, *, recurrent: bool = True) -> None:
    """Join q, k, v, as far as a layer has them, into one product, likewise gate and up, and, if `recurrent`, the
    projections of a layer with a recurrent state, in place, layer by layer, so that each input is read once.

    On a CPU, 120 MB of gate and up in bf16 take 6.0 ms at 2 rows joined and 6.8 ms separate. Not for sharded models:
    the parts of a joined weight are concatenated, so an even split would not give each device its share of every part.
    Weights that a checkpoint has quantised in different ways stay separate.
    """
    for _, module in nnx.iter_modules(model):
        for name, sizes in getattr(module, "joined_projections", {}).items():
            if name.startswith(_OF_RECURRENT_LAYERS) and not recurrent:
                continue
            parts = [getattr(module, part) for part in sizes]
            if len(parts) > 1 and (joined := _joined(parts)):
                setattr(module, name, nnx.data(joined))
                for part in sizes:
                    delattr(module, part)


def quantize(model: CausalLM, quantization: str, choose: ChooseQuantized) -> set[str]:
    """Quantize the weight of every linear layer of the decoder, and of every expert, in place, one scale per output,
    and choose kernels. Embedding, norms and routers stay, and so does a vision tower, which is small and loses more
    accuracy. Returns what `choose_quantized_products` does.

    quantization: "int8" or "fp8", which leaves the head, as vLLM's `Fp8PtpcOnlineLinearMethod` does; activations are
    not rounded to fp8. With int8 a tied head becomes a separate layer: the embedding must stay exact, and the head is
    read for every token.
    """
    format = ROUNDED[quantization]
    shares_head = model.config.eagle is not None and not model.config.eagle.has_head
    if model.lm_head is None and not shares_head and format == "int8":
        embedding = model.model.embed_tokens.weight
        num_rows, size = embedding.get_value().shape
        head = Linear(
            (num_rows, size),
            axes=("vocab", "embed"),
            bias=False,
            init=embedding.get_metadata()["init"],
            dtype=model.config.dtype,
        )
        head.weight.set_value(embedding.get_value())
        model.lm_head = nnx.data(head)
    stay = [("visual",)] if format == "int8" else [("visual",), ("lm_head",)]
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            _quantize_experts(module, format)
        elif isinstance(module, Linear) and path[:1] not in stay:
            if module.weight.get_metadata()["axes"][0] != "router":
                _quantize(module, format)
    return choose_quantized_products(model, choose)


def choose_products(
    model: CausalLM,
    choose: Callable[[jax.Array, tuple[str, ...], tuple[int, ...]], Choice[MatmulKernel]],
) -> None:
    """Set the kernel of each linear layer of the decoder that is not quantized, in place; not of the head, which XLA
    reads as fast as memory allows. `choose` gets a weight, its axes and units.
    """
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Linear) or path[0] in ("visual", "lm_head"):
            continue
        metadata = module.weight.get_metadata()
        if module.scale is None and metadata["axes"][0] != "router":
            choice = choose(module.weight.get_value(), metadata["axes"], metadata["units"])
            module.matmul_kernel = choice.chosen


def choose_lookups(
    model: CausalLM,
    choose: Callable[[jax.Array, tuple[str, ...], tuple[int, ...]], Choice[LookupKernel]],
) -> None:
    """Set the kernel of each embedding of the decoder, in place. `choose` gets a table, its axes and units."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Embedding) and path[0] != "visual":
            metadata = module.weight.get_metadata()
            choice = choose(module.weight.get_value(), metadata["axes"], metadata["units"])
            module.kernel = choice.chosen


def choose_quantized_products(model: CausalLM, choose: ChooseQuantized) -> set[str]:
    """Set the kernel of each linear layer whose weight is quantized, in place. Returns the reasons why the platform's
    kernel is not used, where that is so. `choose` gets a weight, and the axes and units of its data.
    """
    reasons = set()
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and (weight := module.quantized) is not None:
            metadata = module.weight.get_metadata()
            choice = choose(weight, metadata["axes"], metadata["units"])
            module.matmul_kernel = choice.chosen
            reasons.add(choice.reason)
    return reasons - {None}


def choose_experts(
    model: CausalLM, choose: Callable[[Weights, Weights], Choice[ExpertsKernel]]
) -> set[str]:
    """Set the kernel of each mixture of experts, in place, and store scales and zeros as it reads them.

    `choose` gets its gate_up and down, as arrays or shapes. Returns the reasons why the platform's kernel is not used,
    where that is so.
    """
    reasons = set()
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MixtureOfExperts):
            weights = module.experts.weights
            choice = choose(weights.gate_up, weights.down)
            module.kernel = choice.chosen
            reasons.add(choice.reason)
            if choice.chosen.platform == "tpu":
                _pad_groups(module.experts)
    return reasons - {None}


def _pad_groups(experts: Experts) -> None:
    """Scales and zeros of groups, [X, J, F], with J a multiple of a register's rows, in place. Otherwise XLA would have
    experts in these rows, to save memory, and rearrange them for each call of the kernel.
    """
    for weight, part in itertools.product(("gate_up_proj", "down_proj"), ("scale", "zero")):
        name = f"{weight}_{part}"
        parameter: nnx.Param | None = getattr(experts, name)
        shape = () if parameter is None else parameter.get_value().shape
        if parameter is None or len(shape) != 3 or shape[1] % _SUBLANES == 0:
            continue
        metadata, value = parameter.get_metadata(), _now(_padded, parameter.get_value())
        how = {"axes": metadata["axes"], "units": value.shape, "init": metadata["init"]}
        setattr(experts, name, nnx.data(nnx.Param(value, **how, num_groups=shape[1])))


@jax.jit
def _padded(array: jax.Array) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % _SUBLANES), (0, 0)))


def _now(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, computed; for an abstract model the shapes of the result.

    Waiting limits how many layers have their inputs alive at once.
    """
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(function, *arrays)
    return jax.block_until_ready(function(*arrays))


def _concatenate(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate(arrays)


def _concatenate_columns(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate(arrays, axis=1)


def _joined(parts: list[Linear]) -> Linear | None:
    """The parts as one layer; None if their weights are not quantized in the same way."""
    if len({_form(part) for part in parts}) > 1:
        return None
    weight = _now(_concatenate, *(part.weight.get_value() for part in parts))
    metadata = parts[0].weight.get_metadata()
    joined = Linear(
        (weight.shape[0], weight.shape[1]),
        axes=metadata["axes"],
        bias=parts[0].bias is not None,
        init=metadata["init"],
        dtype=weight.dtype,
    )
    joined.weight.set_value(weight)
    for name in ("bias", "scale", "zero"):
        found = [variable for part in parts if (variable := getattr(part, name)) is not None]
        if found:
            setattr(joined, name, nnx.data(_joined_parameter(found)))
    return joined


def _form(layer: Linear) -> tuple[Any, ...]:
    """What layers have in common that can be joined."""
    if layer.scale is None:
        return (layer.weight.get_value().dtype,)
    groups = layer.scale.get_value().shape[:-1]
    return (layer.weight.get_value().dtype, groups, layer.zero is None)


def _joined_parameter(parts: list[nnx.Param]) -> nnx.Param:
    """Parameters of each output, or [J, F] of each group and output, as one."""
    arrays = [part.get_value() for part in parts]
    concatenate = _concatenate if len(arrays[0].shape) == 1 else _concatenate_columns
    value = _now(concatenate, *arrays)
    metadata = parts[0].get_metadata()
    return nnx.Param(value, axes=metadata["axes"], units=value.shape, init=metadata["init"])


def _quantize(layer: Linear, format: str) -> None:
    weight = _now(partial(_rounded, format=format), layer.weight.get_value())
    layer.scale = nnx.data(_scale_of(layer.weight, weight))
    layer.weight.set_value(weight.data)


def _quantize_experts(experts: Experts, format: str) -> None:
    for name in ("gate_up_proj", "down_proj"):
        parameter: nnx.Param = getattr(experts, name)
        weight = _now(partial(_rounded, format=format), parameter.get_value())
        setattr(experts, f"{name}_scale", nnx.data(_scale_of(parameter, weight)))
        parameter.set_value(weight.data)


def _scale_of(parameter: nnx.Param, weight: QuantizedWeight) -> nnx.Param:
    """The parameter for the scale of a quantized `parameter`; it is sharded like the outputs of the weight."""
    metadata = parameter.get_metadata()
    axes, units = metadata["axes"][:-1], metadata["units"][:-1]
    return nnx.Param(weight.scale, axes=axes, units=units, init=metadata["init"])
