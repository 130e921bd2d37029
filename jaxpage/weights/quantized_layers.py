"""Linear layers and experts that compute with the quantised weights of a checkpoint: their parameters, as shapes and
from tensors.

Knows the modules of the decoder and `QuantizedWeight`. Must not know the tensors of checkpoints.

Letters: F outputs, E inputs, J groups of inputs that share a scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpage.models.decoder import CausalLM
from jaxpage.models.experts import Experts
from jaxpage.models.layers import Constant, Linear, Normal, UniformBytes, param
from jaxpage.models.registry import weight_map
from jaxpage.models.sources import Place, Source, Stacked
from jaxpage.parallel.sharding import sharding
from jaxpage.weights.quantization import Quantization, WeightFormat
from jaxpage.weights.quantized import Index, QuantizedTensor, unpacked
from jaxpage.weights.spec import ParamSpec
from jaxpage.weights.stored import Stored
from pallas_kernels.quant_matmul.quantized import FP8, MIDDLE

_ADVICE = 'check that config.json belongs to the weights, or pass quantization="dequantize"'
_AS_MODEL = (
    'use a checkpoint that is quantised as the model, or quantization="dequantize", which takes any'
)
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
    in place, and so each layer's experts, if they are all quantised alike. `model` is abstract, and will be on one
    device or divided over `mesh`.

    Other layers get dequantised weights: heads, and layers whose groups are not of adjacent inputs or have sizes that
    do not divide.
    """
    places = weight_map(model.config)
    for path, layer in nnx.iter_modules(model):
        if path[:2] != ("model", "layers"):
            continue
        name = ".".join(map(str, path))
        if isinstance(layer, Experts):
            for weight in ("gate_up_proj", "down_proj"):
                form = _form_of_experts(f"{name}.{weight}", places, quantization)
                if form is not None:
                    _declare(layer, weight, f"{weight}_scale", f"{weight}_zero", form, 1)
        elif isinstance(layer, Linear):
            place = places.get(f"{name}.weight", Source(f"{name}.weight"))
            # A layer with a single output, such as a gate, is never quantised.
            is_other = layer.weight.get_metadata()["axes"][0] == "router" or layer.shape[0] == 1
            if not isinstance(place, Source) or is_other:
                continue
            form = quantization.format_of(place.tensor.removesuffix(".weight"))
            if form is not None:
                _declare(layer, "weight", "scale", "zero", form, _num_shares(layer, mesh))


def _form_of_experts(
    path: str, places: Mapping[str, Place], quantization: Quantization
) -> WeightFormat | None:
    """The format of all experts' weights; None if it is not one, or if one tensor has them all, as floats."""
    place = places[path]
    if not isinstance(place, Stacked) or quantization.ignores(place.whole or path):
        return None
    layers = (name.removesuffix(".weight") for part in place.parts for name in part)
    first, *others = map(quantization.format_of, layers)
    return first if all(form == first for form in others) else None


def _declare(
    layer: Linear | Experts,
    weight: str,
    scale: str,
    zero: str,
    form: WeightFormat,
    num_shares: int,
) -> None:
    """Replace the parameter `weight` [F, E], or [X, F, E] of experts, and set those with the other two names.

    num_shares: the devices that have different inputs of it.
    """
    parameter: nnx.Param = getattr(layer, weight)
    kind, metadata = _KINDS[form.format], parameter.get_metadata()
    *experts, num_out, num_in = parameter.get_value().shape
    (*by_expert, out_axis, in_axis), (*_, out_units, in_units) = metadata["axes"], metadata["units"]
    if form.has_order or (form.has_zeros and form.format != "int4"):
        return
    init = Constant(getattr(metadata["init"], "stddev", 1.0) / kind.stddev)
    if form.rounds_inputs or (form.format == "fp8_e4m3" and form.group_size is None):
        shape, axes, units = (num_out,), (out_axis,), (out_units,)
    else:
        size = _group_size(form.group_size or num_in, num_in, kind, num_shares)
        if size is None:
            return
        in_units = math.gcd(in_units, num_in // (size * kind.per_byte))
        shape, axes, units = (num_in // size, num_out), (in_axis, out_axis), (in_units, out_units)

    def declared(
        shape: tuple[int, ...], axes: tuple[str, ...], units: tuple[int, ...], init: Any, dtype: Any
    ) -> nnx.Param:
        """With the axis of experts, if there is one, before the others."""
        sizes, units = (*experts, *shape), (*experts, *units)
        axes = (*by_expert, *axes)
        return param(sizes, axes=axes, units=units, init=init, dtype=jnp.dtype(dtype))

    setattr(layer, scale, nnx.data(declared(shape, axes, units, init, "float32")))
    if form.has_zeros:
        setattr(layer, zero, nnx.data(declared(shape, axes, units, Constant(MIDDLE), "uint8")))
    shape, axes = (num_out, num_in // kind.per_byte), (out_axis, in_axis)
    data = declared(shape, axes, (out_units, in_units), kind.dummy, kind.dtype)
    setattr(layer, weight, nnx.data(data))


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
class QuantizedRows:
    """Some outputs of a tensor, as the arrays of a `QuantizedWeight`."""

    tensor: QuantizedTensor
    place: Source  # with a `stop`
    num_groups: int | None  # None: a scale for each output
    has_zeros: bool


@dataclass(frozen=True)
class QuantizedPart:
    """A parameter of a layer with a `QuantizedWeight`: its `part` "data", "scale" or "zero", of a layer [F, ...], or
    with the outputs of several tensors for each expert [X, F, ...], as `weights.stored.Stored`.
    """

    entries: tuple[tuple[QuantizedRows, ...], ...]
    is_stacked: bool  # otherwise there is one entry, with one tensor
    part: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.entries[0][0].tensor.name

    @property
    def names(self) -> list[str]:
        return [rows.tensor.name for entry in self.entries for rows in entry]

    def read(self, index: Index = ()) -> np.ndarray:
        """`parameter[index]`. Raises ValueError if zeros are not those that config.json promises."""
        found = _found(self.entries)
        which = range(len(self.entries))[index[0] if self.is_stacked and index else slice(None)]
        for entry in which:
            if entry not in found:
                found[entry] = _joined([_parts(rows) for rows in self.entries[entry]])
        if not self.is_stacked:
            return found[0][self.part][index]
        # Only experts are divided over devices.
        out = np.empty((len(which), *self.shape[1:]), self.dtype)
        for entry, array in zip(which, out, strict=True):
            array[...] = found[entry][self.part]
        return out[(slice(None), *index[1:])]


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One after the other by output, the first axis of data, and the last of scales and zeros."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: np.concatenate([each[name] for each in parts], axis=0 if name == "data" else -1)
        for name in parts[0]
    }


def _bits(number: np.dtype) -> str:
    return {np.dtype(np.uint8): "4 bits", np.dtype(np.int8): "int8"}.get(number, "fp8")


class QuantizedPaths(NamedTuple):
    """The paths of the parameters of a `QuantizedWeight`."""

    data: str
    scale: str
    zero: str


def quantized_weights(wanted: Iterable[str]) -> list[QuantizedPaths]:
    """The quantised weights among a model's parameters, of linear layers and experts."""
    found = []
    for path in wanted:
        layer, _, name = path.rpartition(".")
        if name == "scale":
            found.append(QuantizedPaths(f"{layer}.weight", path, f"{layer}.zero"))
        elif name in ("gate_up_proj_scale", "down_proj_scale"):
            data = path.removesuffix("_scale")
            found.append(QuantizedPaths(data, path, f"{data}_zero"))
    return found


def parts_of(
    paths: QuantizedPaths,
    place: Place,
    wanted: Mapping[str, ParamSpec],
    stored: Mapping[str, Stored],
) -> Iterator[tuple[str, QuantizedPart]]:
    """The parameters of such a weight by path, whose tensors are at `place`. Raises ValueError if the checkpoint does
    not fit.
    """
    assert isinstance(place, Source | Stacked)
    is_stacked = isinstance(place, Stacked)
    data, scale = wanted[paths.data], wanted[paths.scale]
    num_out, width = data.shape[-2:]
    per_byte = 2 if data.dtype == np.uint8 else 1
    num_groups = scale.shape[-2] if len(scale.shape) == len(data.shape) else None
    sources = tuple(tuple(map(Source, part)) for part in place.parts) if is_stacked else ((place,),)
    shape = (num_out // len(sources[0]), width * per_byte)
    check = partial(_check, paths.data, shape, data.dtype, num_groups)

    def rows(source: Source) -> QuantizedRows:
        tensor = stored.get(source.tensor)
        if not isinstance(tensor, QuantizedTensor):
            found = "lacks it" if tensor is None else f"has it as {tensor.dtype}"
            raise ValueError(
                f"{source.tensor} is quantised according to config.json, but the checkpoint {found}: {_ADVICE}"
            )
        place = replace(source, stop=tensor.shape[0]) if source.stop is None else source
        found = QuantizedRows(tensor, place, num_groups, paths.zero in wanted)
        check(found)
        return found

    entries = tuple(tuple(map(rows, part)) for part in sources)
    for part, path in paths._asdict().items():
        if path in wanted:
            spec = wanted[path]
            yield path, QuantizedPart(entries, is_stacked, part, spec.dtype, spec.shape)


def _check(
    path: str, shape: tuple[int, int], number: np.dtype, num_groups: int | None, rows: QuantizedRows
) -> None:
    """Raise ValueError if these outputs do not fit the parameter."""
    tensor, place = rows.tensor, rows.place
    assert place.stop is not None
    num_out = place.groups * (place.stop - place.start)
    if (num_out, tensor.shape[1]) != shape or place.groups * place.stop > tensor.shape[0]:
        raise ValueError(
            f"{tensor.name} has shape {list(tensor.shape)} in the checkpoint; {path} of the model wants "
            f"{list(shape)} of it: check that config.json belongs to the weights"
        )
    if tensor.number != number:
        raise ValueError(
            f"{tensor.name} is quantised to {_bits(tensor.number)} in the checkpoint, and {path} of the model to "
            f"{_bits(number)}: {_AS_MODEL}"
        )
    # As the kernels decide it, see `QuantizedWeight.rounds_x`.
    model_rounds = number == np.int8 and num_groups is None
    if tensor.rounds_inputs != model_rounds:
        raise ValueError(
            f"{tensor.name} is quantised for inputs that are {'' if tensor.rounds_inputs else 'not '}rounded to int8, "
            f"and the model {'rounds them' if model_rounds else 'does not round them'}: {_AS_MODEL}"
        )
    # Groups may have the scale of their output, but not the other way round.
    if (num_groups or 1) % (tensor.num_groups or 1) or (
        num_groups is None and tensor.num_groups is not None
    ):
        raise ValueError(
            f"{tensor.name} has scales for {tensor.num_groups or 'no'} groups of inputs in the checkpoint, and {path} "
            f"of the model for {num_groups or 'none'}: check that config.json belongs to the weights; {_AS_MODEL}"
        )


# The parts of a weight are read one after the other, and each device reads its share.
@functools.lru_cache(maxsize=1)
def _found(entries: tuple[tuple[QuantizedRows, ...], ...]) -> dict[int, dict[str, np.ndarray]]:
    """Of each entry that was read, all parts; the last weight's are kept."""
    del entries
    return {}


def _parts(rows: QuantizedRows) -> dict[str, np.ndarray]:
    tensor, num_groups = rows.tensor, rows.num_groups
    whole = unpacked(tensor).rows(rows.place.rows(tensor.shape[0]))
    if whole.groups is not None:
        raise ValueError(
            f"{tensor.name} has groups of inputs that are not adjacent, and those of the model are: {_ADVICE}"
        )
    parts = {"data": whole.q, "scale": whole.scale}
    times, middle = 1, 0
    if num_groups is not None:
        scale = whole.scale.reshape(-1, len(whole.q))
        times = num_groups // len(scale)
        parts["scale"] = np.repeat(scale, times, axis=0)
        if whole.q.dtype == np.uint8:
            parts["data"], middle = _pairs(whole.q, num_groups), MIDDLE
    if rows.has_zeros:
        assert whole.zero is not None
        parts["zero"] = np.repeat(whole.zero, times, axis=0).astype(np.uint8)
    elif whole.zero is not None and (whole.zero != middle).any():
        raise ValueError(
            f"{tensor.name} has zeros of {whole.zero.min()} to {whole.zero.max()} in the checkpoint, and the model "
            f"wants it symmetric, with {middle}: {_ADVICE}"
        )
    return parts


def _pairs(q: np.ndarray, num_groups: int) -> np.ndarray:
    """uint8[F, E] in 0..15 -> uint8[F, E / 2], as `QuantizedWeight` has them: of each pair of groups the first in the
    low halves of bytes.
    """
    groups = q.reshape(len(q), num_groups, -1)
    return (groups[:, 0::2] | (groups[:, 1::2] << 4)).reshape(len(q), -1)


def forget() -> None:
    """Free what was kept of the tensors that were read last."""
    _found.cache_clear()
    unpacked.cache_clear()
