"""Loads a checkpoint into a model: each device reads its own slices, one tensor at a time.

All errors that headers show are found before the first array is created. Knows parameter specs and stored tensors; must
not know families except their weight map.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.pooling_model import PoolingModel
from jaxpage.models.registry import naming_of
from jaxpage.models.sources import Naming, Place, Rearranged, Source
from jaxpage.weights.orbax import find_tree
from jaxpage.weights.restore import loading_bar, restore
from jaxpage.weights.safetensors import StoredTensor, open_checkpoint
from jaxpage.weights.spec import FLOATS, ParamSpec, listed, specs, variables
from jaxpage.weights.stored import BLOCKS, MXFP4, Stored, stored_parameter, tensors_of

Model = TypeVar("Model", bound=CausalLM | PoolingModel)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_COMPARED = 4096  # at a time, to limit memory when the head of a tied model is compared
# Tensors that only quantized checkpoints have -> the method.
_QUANTISED_NAMES = {
    ".qweight": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8 in blocks",
    ".weight_scale": "fp8 or int8",
}


def load(
    model: Model,
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    use_tqdm: bool = True,
    naming: Naming | None = None,
) -> Model:
    """Load the weights in `folder` into `model`, abstract or not, cast to the declared dtypes; returns the model.

    Safetensors, or an Orbax checkpoint as `orbax.find_tree` and `layouts` know them; for Orbax, `folder` may be in a
    bucket, gs://... Arrays are sharded over `mesh` (None: the first local device). Peak host memory is one tensor, or
    the experts of one layer; for Orbax, 64 MiB or a sixteenth of all. gpt-oss's mxfp4 is dequantized. Raises
    ValueError, and does not change the model, if the checkpoint has missing, surplus or misshaped tensors, is quantized
    otherwise, or is damaged.

    `naming`: for models that `registry` does not know; they are read from safetensors only.
    """
    tree = find_tree(folder)
    if tree is not None and isinstance(model, CausalLM):
        return restore(model, tree, mesh=mesh, use_tqdm=use_tqdm)
    stored = open_safetensors(model, folder, naming)
    targets = variables(model)
    total = sum(each.dtype.itemsize * math.prod(each.shape) for each in stored.values())
    with loading_bar(total, use_tqdm) as progress:
        for path, spec in specs(model).items():
            array = _array(spec, stored[path], mesh)
            # Wait: queued transfers would keep the host copies of many tensors alive.
            targets[path].set_value(jax.block_until_ready(array))
            progress.update(stored[path].dtype.itemsize * array.size)
    return model


def open_safetensors(
    model: CausalLM | PoolingModel, folder: str | Path, naming: Naming | None = None
) -> dict[str, Stored]:
    """Each parameter by path as stored in a checkpoint. Raises like `load`."""
    config = model.config
    if naming is None:
        assert isinstance(config, ModelConfig)
        naming = naming_of(config)
    stored = {
        name: tensor
        for theirs, tensor in open_checkpoint(folder).items()
        if (name := naming.tensor_name(theirs)) is not None
    }
    wanted, renamed = specs(model), naming.weight_map
    is_tied = isinstance(model, CausalLM) and _HEAD not in wanted
    if is_tied and _HEAD in stored and _EMBEDDING not in stored:
        stored[_EMBEDDING] = stored.pop(_HEAD)  # as transformers does
    places = {path: renamed.get(path, Source(path)) for path in wanted}
    how = _quantisation(Path(folder, "config.json")) or _quantisation_by_names(stored)
    _check_not_quantised(how, places.values())
    names = {path: tensors_of(path, place, stored) for path, place in places.items()}
    _check_names(itertools.chain(*names.values()), stored, tied=_HEAD not in wanted)
    for each in names.values():
        _check_dtypes([stored[name] for name in each])
    found = {
        path: stored_parameter(path, places[path], spec.shape, stored)
        for path, spec in wanted.items()
    }
    _check_rows(places.values(), stored)
    if _HEAD not in wanted and _HEAD in stored:
        _check_tied(stored)
    return found


def _array(spec: ParamSpec, stored: Stored, mesh: Mesh | None) -> jax.Array:
    pieces: dict[tuple, np.ndarray] = {}  # shared by replicas

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        """The slice of the parameter at `index`, for one device."""
        assert index is not None
        bounds = [part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True)]
        key = tuple(bounds)
        if key not in pieces:
            piece = stored.read(tuple(slice(*pair) for pair in bounds))
            pieces[key] = piece.astype(spec.dtype, copy=False)
        return pieces[key]

    return jax.make_array_from_callback(spec.shape, spec.sharding(mesh), read)


def check_can_be_loaded(config: ModelConfig, quantization_config: object) -> None:
    """Raise ValueError if `load` does not read weights that are quantized so, according to config.json."""
    _check_not_quantised(_in_words(quantization_config), naming_of(config).weight_map.values())


def _check_not_quantised(how: str | None, places: Iterable[Place]) -> None:
    """`places`: where the parameters are in the checkpoint. Only those of gpt-oss can be in mxfp4."""
    reads_mxfp4 = any(isinstance(place, Rearranged) for place in places)
    if how is not None and not (reads_mxfp4 and how == MXFP4):
        raise ValueError(
            f"the checkpoint is quantised ({how}), which is not supported; use the one in bfloat16, "
            'float16 or float32 that it was made from. jaxpage can round that itself: quantization="int8" '
            "for linear layers, kv_cache_dtype for the KV cache"
        )


def _quantisation(file: Path) -> str | None:
    """The quantization that config.json declares: method and numbers."""
    try:
        return _in_words(json.loads(file.read_text()).get("quantization_config"))
    except (OSError, ValueError, AttributeError):  # reported by the code that reads the config
        return None


def _in_words(found: object) -> str | None:
    if not isinstance(found, dict) or not found:
        return None
    numbers = (("bits", "{} bits"), ("w_bit", "{} bits"), ("group_size", "groups of {}"))
    facts = [text.format(found[name]) for name, text in numbers if name in found]
    return ", ".join([str(found.get("quant_method", "no quant_method")), *facts])


def _quantisation_by_names(stored: dict[str, StoredTensor]) -> str | None:
    """The same from tensor names, for checkpoints whose config.json does not declare it."""
    for suffix, method in _QUANTISED_NAMES.items():
        name = next((name for name in stored if name.endswith(suffix)), None)
        if name is not None:
            return f"{method}, as it has {name}"
    return None


def _check_names(names: Iterable[str], stored: dict[str, StoredTensor], *, tied: bool) -> None:
    names = set(names)
    missing = sorted(names - set(stored))
    surplus = sorted(n for n in set(stored) - names if not _harmless(n, tied))
    problems = []
    if missing:
        problems.append(f"it lacks {listed(missing)}")
    if surplus:
        problems.append(f"it has {listed(surplus)}, which the model does not know")
    if problems:
        raise ValueError(
            f"the checkpoint does not fit the model: {'; '.join(problems)}. Check that config.json "
            "belongs to the weights"
        )


def _harmless(name: str, tied: bool) -> bool:
    """Whether a tensor is redundant: RoPE frequencies of old checkpoints, a tied model's head."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _HEAD)


def _check_dtypes(tensors: list[StoredTensor]) -> None:
    """Raises ValueError unless all are floats of one dtype, or bytes of mxfp4."""
    first = tensors[0]
    if first.name.endswith(BLOCKS) and all(each.dtype == np.uint8 for each in tensors):
        return
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.name} is stored as {tensor.dtype}: quantised checkpoints are not supported; "
                "use one in bfloat16, float16 or float32"
            )
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{tensor.name} is stored as {tensor.dtype}, and {first.name} of the same parameter as "
                f"{first.dtype}; the checkpoint is inconsistent, download it again"
            )


def _check_rows(places: Iterable[Place], stored: dict[str, StoredTensor]) -> None:
    """Raises ValueError unless a fused tensor has exactly the rows of its parts."""
    rows: dict[str, int] = {}
    for source in places:
        if isinstance(source, Source) and source.stop is not None:
            rows[source.tensor] = max(rows.get(source.tensor, 0), source.stop)
    for name, wanted in rows.items():
        found = stored[name].shape[0]
        if found != wanted:
            raise ValueError(
                f"{name} has {found} rows in the checkpoint; the model's parts of it have "
                f"{wanted}: check that config.json belongs to the weights"
            )


def _check_tied(stored: dict[str, StoredTensor]) -> None:
    """Raises ValueError if a tied model is stored with a head that differs from the embedding."""
    head, embedding = stored[_HEAD], stored[_EMBEDDING]
    equal = head.shape == embedding.shape and head.dtype == embedding.dtype
    for start in range(0, head.shape[0] if equal else 0, _ROWS_COMPARED):
        rows = (slice(start, start + _ROWS_COMPARED),)
        equal = equal and np.array_equal(head.read(rows), embedding.read(rows))
    if not equal:
        raise ValueError(
            f"config.json ties the embeddings, but {_HEAD} differs from {_EMBEDDING}; "
            "set tie_word_embeddings to false"
        )
