"""From an adapter's folder to the contents of an adapter slot.

Knows how adapters are stored on the device (`models.lora`), and the names of a model's layers in checkpoints. Must not
know which slots exist, or who uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.models.lora import AdapterArray, adapter_arrays
from jaxpage.models.sources import Place, Source
from jaxpage.weights.peft import AdaptedLayers, LowRank, read_adapter


def adapter_reader(
    model: CausalLM, *, num_slots: int, max_rank: int
) -> Callable[[str], list[np.ndarray]]:
    """A function that reads a PEFT folder as the contents of a slot, see `models.lora.write_slot`.

    It raises ValueError for a folder that is not an adapter of this model, or has a rank above `max_rank`.
    """
    arrays, config = adapter_arrays(model, num_slots), model.config
    sources = _sources(arrays, registry.weight_map(config))
    layers = AdaptedLayers(
        shapes=_shapes(arrays, sources),
        rename=partial(registry.tensor_name, config),
        is_idle=partial(registry.is_idle, config),
    )

    def read(folder: str) -> list[np.ndarray]:
        stored = read_adapter(folder, layers, max_rank=max_rank)
        halves = {
            layer: LowRank(found.a, found.b[source.rows(len(found.b))])
            for layer, source in sources.items()
            if (found := stored.get(source.tensor)) is not None
        }
        return [_filled(array, halves, folder) for array in arrays]

    return read


def _sources(arrays: list[AdapterArray], weight_map: Mapping[str, Place]) -> dict[str, Source]:
    """The place of each of the model's layers in checkpoints: rows of a layer, here without ".weight"."""
    layers = {layer for array in arrays for layer in array.layers}
    found = {}
    for layer in sorted(layers):
        source = weight_map.get(f"{layer}.weight", Source(f"{layer}.weight"))
        assert isinstance(source, Source), f"{layer} is no linear layer"
        found[layer] = replace(source, tensor=source.tensor.removesuffix(".weight"))
    return found


def _shapes(
    arrays: list[AdapterArray], sources: Mapping[str, Source]
) -> dict[str, tuple[int, int]]:
    """(out, in) of each layer in checkpoints."""
    num_in = {layer: array.shape[1] for array in arrays if array.is_a for layer in array.layers}
    shapes: dict[str, tuple[int, int]] = {}
    for array in arrays:
        if not array.is_a:
            (layer,) = array.layers
            source = sources[layer]
            stop = source.groups * source.start + array.shape[0]
            num_out = max(stop, *shapes.get(source.tensor, (0, 0))[:1])
            shapes[source.tensor] = (num_out, num_in[layer])
    return shapes


def _filled(array: AdapterArray, halves: Mapping[str, LowRank], folder: str) -> np.ndarray:
    """An adapter's part of an array: zeros for layers that it does not change and for unused ranks."""
    values = np.zeros(array.shape, np.float32)
    size = array.shape[0] // len(array.layers)
    for index, layer in enumerate(array.layers):
        if layer in halves and array.is_a:
            a = halves[layer].a
            values[index * size : index * size + len(a)] = a
        elif layer in halves:
            b = halves[layer].b
            values[:, : b.shape[1]] = b
    with np.errstate(over="ignore"):
        rounded = values.astype(array.dtype)
    if not np.isfinite(rounded.astype(np.float32)).all():
        raise ValueError(
            f"{folder}: what the adapter has of {array.layers[0]} is too large for {array.dtype}"
        )
    return rounded
