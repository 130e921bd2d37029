"""Loads a checkpoint into a model: each device reads its own slices, one tensor at a time.

All errors that headers show are found before the first array is created. Knows parameter specs and stored tensors; must
not know families except their weight map.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.pooling_model import PoolingModel
from jaxpage.models.registry import naming_of
from jaxpage.models.sources import Naming, Place, Rearranged, Source
from jaxpage.weights.find_quantized import with_quantized
from jaxpage.weights.orbax import find_tree
from jaxpage.weights.quantization import Quantization, quantization_of, unsupported, with_floats
from jaxpage.weights.quantized import QuantizedTensor
from jaxpage.weights.quantized_layers import QuantizedPart, forget, parts_of, quantized_weights
from jaxpage.weights.restore import loading_bar, restore
from jaxpage.weights.safetensors import INDEX, SINGLE, StoredTensor, open_checkpoint
from jaxpage.weights.spec import FLOATS, ParamSpec, listed, specs, variables
from jaxpage.weights.stored import BLOCKS, Stored, Turned, stored_parameter, tensors_of

Tensor = StoredTensor | QuantizedTensor | Turned
Tensors = dict[str, Tensor]
Model = TypeVar("Model", bound=CausalLM | PoolingModel)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROTARY = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
_ROWS_COMPARED = 4096  # at a time, to limit memory when the head of a tied model is compared


def load(
    model: Model,
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    use_tqdm: bool = True,
    naming: Naming | None = None,
    hf_config: Any = None,
) -> Model:
    """Load the weights in `folder` into `model`, abstract or not, cast to the declared dtypes; returns the model.

    Safetensors, or an Orbax checkpoint as `orbax.find_tree` and `layouts` know them; for Orbax, `folder` may be in a
    bucket, gs://... Arrays are sharded over `mesh` (None: the first local device). Peak host memory is one tensor, or
    the experts of one layer; for Orbax, 64 MiB or a sixteenth of all. Quantised weights are dequantised, except in
    layers that `quantized_layers.declare` prepared for them. Raises ValueError, and does not change the model, if the
    checkpoint has missing, surplus or misshaped tensors, is quantised in a way that is not supported, or is truncated.
    Whether zeros and the order of inputs are what config.json says is found out later, when some are loaded already.

    `naming`: for models that `registry` does not know; they are read from safetensors only. `hf_config`: says how the
    weights are quantised; None: config.json in the folder does.
    """
    tree = find_tree(folder)
    if tree is not None and isinstance(model, CausalLM):
        return restore(model, tree, mesh=mesh, use_tqdm=use_tqdm)
    try:
        stored = open_safetensors(model, folder, naming, hf_config)
        targets = variables(model)
        total = sum(each.dtype.itemsize * math.prod(each.shape) for each in stored.values())
        with loading_bar(total, use_tqdm) as progress:
            for path, spec in specs(model).items():
                array = _array(spec, stored[path], mesh)
                # Wait: queued transfers would keep the host copies of many tensors alive.
                targets[path].set_value(jax.block_until_ready(array))
                progress.update(stored[path].dtype.itemsize * array.size)
    finally:
        forget()
    return model


def open_safetensors(
    model: CausalLM | PoolingModel,
    folder: str | Path,
    naming: Naming | None = None,
    hf_config: Any = None,
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
    how = quantization_config_in(folder) if hf_config is None else quantization_config_of(hf_config)
    stored = _turned(with_quantized(stored, _quantization(how, renamed.values())), places.values())
    parts: dict[str, QuantizedPart] = {}
    for paths in quantized_weights(wanted):
        parts |= parts_of(paths, places[paths.data], wanted, stored)
    names = {
        path: tensors_of(path, place, stored) for path, place in places.items() if path not in parts
    }
    names_of_parts = (name for part in parts.values() for name in part.names)
    _check_names(itertools.chain(names_of_parts, *names.values()), stored, tied=_HEAD not in wanted)
    for path, each in names.items():
        tensors = [stored[name] for name in each]
        check = _check_integers if wanted[path].dtype == np.int32 else _check_dtypes
        check([each for each in tensors if not isinstance(each, QuantizedTensor)])
    found: dict[str, Stored] = {**parts}
    for path in names:
        found[path] = stored_parameter(path, places[path], wanted[path].shape, stored)
    _check_rows(places.values(), stored)
    if _HEAD not in wanted and _HEAD in stored:
        _check_tied(stored)
    return found


def _turned(
    stored: Mapping[str, StoredTensor | QuantizedTensor], places: Iterable[Place]
) -> Tensors:
    """The tensors with those that are stored [I, O] as [O, I]."""
    names = {each.tensor for each in places if isinstance(each, Source) and each.turns}
    return {
        name: Turned(tensor)
        if name in names and isinstance(tensor, StoredTensor) and len(tensor.shape) == 2
        else tensor
        for name, tensor in stored.items()
    }


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


def quantization_of_checkpoint(
    model: ModelConfig, hf_config: Any, folder: str | Path
) -> Quantization | None:
    """How weights are quantised according to config.json; None: not, or in gpt-oss's mxfp4. If there are safetensors in
    `folder`, layers with floats count as exceptions, even where config.json does not list them. Orbax has floats alone.

    Raises ValueError for what is not supported.
    """
    config = quantization_config_of(hf_config)
    found = _quantization(config, naming_of(model).weight_map.values())
    if found is None or find_tree(folder) is not None:
        return None
    if not any(Path(folder, name).is_file() for name in (SINGLE, INDEX)):
        return found
    floats = (
        name.removesuffix(".weight")
        for name, tensor in open_checkpoint(folder).items()
        if has_floats(tensor)
        and (len(tensor.shape) == 2 and name.endswith(".weight") or _has_experts(name))
    )
    return with_floats(found, floats)


def has_floats(tensor: StoredTensor) -> bool:
    """False too for a dtype that is not supported."""
    return tensor.is_supported and tensor.dtype in FLOATS


def _has_experts(name: str) -> bool:
    """Whether a tensor has all experts of a layer."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def quantization_config_of(hf_config: Any) -> Any:
    """The quantization_config of a config.json, or of the part of it about text."""
    name = "quantization_config"
    return getattr(hf_config, name, None) or getattr(hf_config.get_text_config(), name, None)


def _quantization(config: Any, places: Iterable[Place]) -> Quantization | None:
    """`places`: where parameters are, that are not tensors with their names. Only gpt-oss can be in mxfp4."""
    found = quantization_of(config)
    if config and found is None and not any(isinstance(place, Rearranged) for place in places):
        raise unsupported(config, "only gpt-oss has weights in mxfp4 that can be read")
    return found


def quantization_config_in(folder: str | Path) -> Any:
    """The same of the config.json in a folder; None if there is no such file."""
    try:
        values = json.loads(Path(folder, "config.json").read_text())
        text = values.get("text_config") or {}
        return values.get("quantization_config") or text.get("quantization_config")
    except (OSError, ValueError, AttributeError):  # reported by the code that reads the config
        return None


def _check_names(names: Iterable[str], stored: Tensors, *, tied: bool) -> None:
    names = set(names)
    missing = sorted(names - set(stored))
    surplus = sorted(n for n in set(stored) - names if not _harmless(n, stored, tied))
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


def _harmless(name: str, stored: Tensors, tied: bool) -> bool:
    """Whether a tensor is redundant: RoPE frequencies of old checkpoints, a tied model's head, zeros that GPTQ adds as
    the bias of each layer.
    """
    if name.endswith(".bias"):
        weight = stored.get(f"{name.removesuffix('.bias')}.weight")
        return isinstance(weight, QuantizedTensor) and not stored[name].read().any()
    return name.endswith(_ROTARY) or (tied and name == _HEAD)


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError unless all are floats of one dtype, or bytes of mxfp4. `tensors`: of a parameter."""
    if not tensors:
        return
    first = tensors[0]
    if first.name.endswith(BLOCKS) and all(each.dtype == np.uint8 for each in tensors):
        return
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.name} is stored as {tensor.dtype}, but config.json does not say how it is quantised; use "
                "a checkpoint in bfloat16, float16 or float32, or one with a quantization_config"
            )
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{tensor.name} is stored as {tensor.dtype}, and {first.name} of the same parameter as "
                f"{first.dtype}; the checkpoint is inconsistent, download it again"
            )


def _check_integers(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError unless all are integers."""
    for tensor in tensors:
        if not np.issubdtype(tensor.dtype, np.integer):
            raise ValueError(
                f"{tensor.name} is stored as {tensor.dtype}, and must be integers; the checkpoint is inconsistent, "
                "download it again"
            )


def _check_rows(places: Iterable[Place], stored: Tensors) -> None:
    """Raises ValueError unless a fused tensor has exactly the rows of its parts."""
    rows: dict[str, int] = {}
    for source in places:
        if isinstance(source, Source) and source.stop is not None:
            rows[source.tensor] = max(rows.get(source.tensor, 0), source.groups * source.stop)
    for name, wanted in rows.items():
        found = stored[name].shape[0]
        if found != wanted:
            raise ValueError(
                f"{name} has {found} rows in the checkpoint; the model's parts of it have "
                f"{wanted}: check that config.json belongs to the weights"
            )


def _check_tied(stored: Tensors) -> None:
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
