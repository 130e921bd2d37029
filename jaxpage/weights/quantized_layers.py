"""Linear layers that compute with the quantised weights of a checkpoint: their parameters, as shapes and from tensors.

Knows the modules of the decoder and `QuantizedWeight`. Must not know the tensors of checkpoints.

Letters: F outputs, E inputs, J groups of inputs that share a scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpage.models.decoder import CausalLM
from jaxpage.models.layers import Constant, Linear, Normal, UniformBytes, param
from jaxpage.models.registry import weight_map
from jaxpage.models.sources import Place, Source
from jaxpage.parallel.sharding import sharding
from jaxpage.weights.quantization import Quantization, WeightFormat
from jaxpage.weights.quantized import Index, QuantizedTensor, unpacked
from jaxpage.weights.safetensors import StoredTensor
from jaxpage.weights.spec import ParamSpec
from pallas_kernels.quant_matmul.quantized import FP8, MIDDLE

_ADVICE = 'check that config.json belongs to the weights, or pass quantization="dequantize"'
# Inputs of a group, as kernels have them. Larger groups are divided, others only if it takes that to share them.
_MOST_GROUPED, _LEAST_GROUPED = 128, 32


class _Kind(NamedTuple):
    """What the format of a weight means for its parameters."""

    dtype: Any
    per_byte: int  # inputs; groups are stored in as many halves of bytes
    dummy: Normal | UniformBytes  # random values
    stddev: float  # of these


_KINDS = {
    "int4": _Kind(jnp.uint8, 2, UniformBytes(), 4.6),
    "int8": _Kind(jnp.int8, 1, UniformBytes(), 74.0),
    "fp8_e4m3": _Kind(FP8, 1, Normal(30.0), 30.0),
}


def declare(model: CausalLM, quantization: Quantization, mesh: Mesh | None = None) -> None:
    """Give each linear layer of the decoder that the checkpoint has quantised the parameters of a `QuantizedWeight`,
    in place. `model` is abstract, and will be on one device or divided over `mesh`.

    Other layers get dequantised weights: experts, heads, and layers whose groups are not of adjacent inputs or have
    sizes that do not divide.
    """
    places = weight_map(model.config)
    for path, layer in nnx.iter_modules(model):
        if not isinstance(layer, Linear) or path[:2] != ("model", "layers"):
            continue
        name = ".".join(map(str, path)) + ".weight"
        place = places.get(name, Source(name))
        if not isinstance(place, Source) or layer.weight.get_metadata()["axes"][0] == "router":
            continue
        form = quantization.format_of(place.tensor.removesuffix(".weight"))
        if form is not None:
            _declare(layer, form, mesh)


def _declare(layer: Linear, form: WeightFormat, mesh: Mesh | None) -> None:
    (num_out, num_in), kind = layer.shape, _KINDS[form.format]
    metadata = layer.weight.get_metadata()
    (out_axis, in_axis), (out_units, in_units) = metadata["axes"], metadata["units"]
    # A layer with a single output, such as a gate, is never quantised.
    if num_out == 1 or form.has_order or (form.has_zeros and form.format != "int4"):
        return
    scale = Constant(getattr(metadata["init"], "stddev", 1.0) / kind.stddev)
    if form.group_size is None and (form.format == "fp8_e4m3" or form.rounds_inputs):
        shape, axes, units = (num_out,), (out_axis,), (out_units,)
    else:
        size = _group_size(form.group_size or num_in, num_in, kind, _num_shares(layer, mesh))
        if size is None:
            return
        in_units = math.gcd(in_units, num_in // (size * kind.per_byte))
        shape, axes, units = (num_in // size, num_out), (in_axis, out_axis), (in_units, out_units)
    with_scale = {"shape": shape, "axes": axes, "units": units}
    layer.scale = nnx.data(param(**with_scale, init=scale, dtype=jnp.dtype("float32")))
    if form.has_zeros:
        middle = Constant(MIDDLE)
        layer.zero = nnx.data(param(**with_scale, init=middle, dtype=jnp.dtype("uint8")))
    layer.weight = nnx.data(
        param(
            (num_out, num_in // kind.per_byte),
            axes=(out_axis, in_axis),
            units=(out_units, in_units),
            init=kind.dummy,
            dtype=jnp.dtype(kind.dtype),
        )
    )


def _num_shares(layer: Linear, mesh: Mesh | None) -> int:
    """The devices that have different inputs of the layer."""
    metadata = layer.weight.get_metadata()
    where = sharding(mesh, metadata["axes"], metadata["units"])
    divides = isinstance(where, NamedSharding) and len(where.spec) == 2
    return mesh.size if divides and mesh is not None else 1


def _group_size(size: int, num_in: int, kind: _Kind, num_shares: int) -> int | None:
    """`size`, or a part of it, so that each share has whole groups, and pairs of them for int4; None: there is none."""
    if size > _MOST_GROUPED and size % _MOST_GROUPED == 0:
        size = _MOST_GROUPED
    if num_in % size:
        return None
    for shares in (num_shares, 1):  # 1: each device has all inputs
        part = size
        while num_in % (part * kind.per_byte * shares) and part % 2 == 0 and part > _LEAST_GROUPED:
            part //= 2
        if num_in % (part * kind.per_byte * shares) == 0:
            return part
    return None


@dataclass(frozen=True)
class QuantizedPart:
    """A parameter of a layer with a `QuantizedWeight`: the `part` "weight", "scale" or "zero", of some rows of a
    tensor, as `weights.stored.Stored`.
    """

    tensor: QuantizedTensor
    start: int
    stop: int
    num_groups: int | None  # None: a scale for each output
    has_zeros: bool
    part: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.tensor.name

    def read(self, index: Index = ()) -> np.ndarray:
        """`parameter[index]`. Raises ValueError if zeros are not those that config.json promises."""
        return _parts(self.tensor, self.start, self.stop, self.num_groups, self.has_zeros)[
            self.part
        ][index]


def _bits(number: np.dtype) -> str:
    return {np.dtype(np.uint8): "4 bits", np.dtype(np.int8): "int8"}.get(number, "fp8")


def quantized_layers(wanted: Mapping[str, ParamSpec]) -> list[str]:
    """The paths of layers with quantised weights, given a model's parameters."""
    return [path.removesuffix(".scale") for path in wanted if path.endswith(".scale")]


def parts_of(
    layer: str,
    place: Place,
    wanted: Mapping[str, ParamSpec],
    stored: Mapping[str, StoredTensor | QuantizedTensor],
) -> Iterator[tuple[str, QuantizedPart]]:
    """The parameters of such a layer by path, whose weight is at `place`. Raises ValueError if the checkpoint does not
    fit.
    """
    assert isinstance(place, Source)
    tensor = stored.get(place.tensor)
    if not isinstance(tensor, QuantizedTensor):
        found = "lacks it" if tensor is None else f"has it as {tensor.dtype}"
        raise ValueError(
            f"{place.tensor} is quantised according to config.json, but the checkpoint {found}: {_ADVICE}"
        )
    weight, scale = wanted[f"{layer}.weight"], wanted[f"{layer}.scale"]
    start, stop = place.start, tensor.shape[0] if place.stop is None else place.stop
    num_groups = scale.shape[0] if len(scale.shape) == 2 else None
    per_byte = 2 if weight.dtype == np.uint8 else 1
    model_shape = (weight.shape[0], weight.shape[1] * per_byte)
    if (stop - start, tensor.shape[1]) != model_shape or stop > tensor.shape[0]:
        raise ValueError(
            f"{tensor.name} has shape {list(tensor.shape)} in the checkpoint; {layer} of the model wants "
            f"{list(model_shape)} of it: check that config.json belongs to the weights"
        )
    if tensor.number != weight.dtype:
        raise ValueError(
            f"{tensor.name} is quantised to {_bits(tensor.number)} in the checkpoint, and {layer} of the model to "
            f"{_bits(weight.dtype)}: use a checkpoint that is quantised as the model, or "
            'quantization="dequantize", which takes any'
        )
    # Groups may have the scale of their output, but not the other way round.
    if (num_groups or 1) % (tensor.num_groups or 1) or (
        num_groups is None and tensor.num_groups is not None
    ):
        raise ValueError(
            f"{tensor.name} has scales for {tensor.num_groups or 'no'} groups of inputs, and config.json says "
            f"otherwise: {_ADVICE}"
        )
    zero = f"{layer}.zero"
    for part in ("weight", "scale", "zero"):
        path = f"{layer}.{part}"
        if path in wanted:
            spec = wanted[path]
            yield (
                path,
                QuantizedPart(
                    tensor, start, stop, num_groups, zero in wanted, part, spec.dtype, spec.shape
                ),
            )


# A layer's parts are read one after the other, and each device reads its share.
@functools.lru_cache(maxsize=1)
def _parts(
    tensor: QuantizedTensor, start: int, stop: int, num_groups: int | None, has_zeros: bool
) -> dict[str, np.ndarray]:
    whole = unpacked(tensor).rows(start, stop)
    if whole.groups is not None:
        raise ValueError(
            f"{tensor.name} has groups of inputs that are not adjacent, and config.json says otherwise: {_ADVICE}"
        )
    parts = {"weight": whole.q, "scale": whole.scale}
    times, middle = 1, 0
    if num_groups is not None:
        scale = whole.scale.reshape(-1, len(whole.q))
        times = num_groups // len(scale)
        parts["scale"] = np.repeat(scale, times, axis=0)
        if whole.q.dtype == np.uint8:
            parts["weight"], middle = _pairs(whole.q, num_groups), MIDDLE
    if has_zeros:
        assert whole.zero is not None
        parts["zero"] = np.repeat(whole.zero, times, axis=0).astype(np.uint8)
    elif whole.zero is not None and (whole.zero != middle).any():
        raise ValueError(
            f"{tensor.name} is quantised symmetrically according to config.json, but its zeros are "
            f"{whole.zero.min()} to {whole.zero.max()}, and not {middle}: {_ADVICE}"
        )
    return parts


def _pairs(q: np.ndarray, num_groups: int) -> np.ndarray:
    """uint8[F, E] in 0..15 -> uint8[F, E / 2], as `QuantizedWeight` has them: of each pair of groups the first in the
    low halves of bytes.
    """
    groups = q.reshape(len(q), num_groups, -1)
    return (groups[:, 0::2] | (groups[:, 1::2] << 4)).reshape(len(q), -1)


def forget() -> None:
    """Free what was kept of the tensor that was read last."""
    _parts.cache_clear()
    unpacked.cache_clear()
