"""LoRA adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Nothing is ever unpickled. Knows names and shapes of the linear layers in the model's checkpoints; must not know
devices, or how adapters are stored there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpage.weights.peft_config import CONFIG, PeftConfig, read_peft_config
from jaxpage.weights.safetensors import StoredTensor, read_header
from jaxpage.weights.spec import FLOATS, listed

TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class LowRank:
    """The update of one linear layer by an adapter: y += B A x. float32; the scale is included in B."""

    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]


@dataclass(frozen=True, kw_only=True)
class AdaptedLayers:
    """The linear layers that adapters may change."""

    shapes: Mapping[str, tuple[int, int]]  # name of the checkpoint's layer -> (out, in)
    # Name of a tensor in an adapter's file -> in `shapes`, both with ".weight"; None: not a part of the model.
    rename: Callable[[str], str | None] = lambda name: name
    # Whether such a tensor is of a layer that computes nothing; what an adapter has of it is left out.
    is_idle: Callable[[str], bool] = lambda name: False


def read_adapter(folder: str | Path, layers: AdaptedLayers, *, max_rank: int) -> dict[str, LowRank]:
    """Both halves for every layer that an adapter changes, by the layer's name.

    Raises ValueError that names the file and the field or tensor, if this is not a complete LoRA adapter of these
    layers, or has a rank above `max_rank`.
    """
    folder = Path(folder)
    config = read_peft_config(folder)
    tensors = _open(folder)
    halves: dict[str, dict[str, StoredTensor]] = {}
    names: dict[str, str] = {}  # our layer -> its name in the file
    for tensor in tensors.values():
        found = _NAME.fullmatch(tensor.name)
        if found is not None and layers.is_idle(f"{found['layer']}.weight"):
            continue
        layer, half = _place(tensor, layers)
        assert found is not None, "_place has checked it"
        names[layer] = found["layer"]
        halves.setdefault(layer, {})[half] = tensor
    if not halves:
        raise ValueError(f"{folder / TENSORS} has no tensors")
    _check_complete(config, halves, names, layers)
    return {
        layer: _read(config, names[layer], found, layers.shapes[layer], max_rank)
        for layer, found in halves.items()
    }


def _open(folder: Path) -> dict[str, StoredTensor]:
    file = folder / TENSORS
    if file.is_file():
        return read_header(file)
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise ValueError(
            f"{folder} has {pickles[0]} and no {TENSORS}: pickle files can run code and are never loaded; save the "
            "adapter anew with PEFT's save_pretrained"
        )
    raise ValueError(f"{folder} has {CONFIG} and no {TENSORS}")


def _place(tensor: StoredTensor, layers: AdaptedLayers) -> tuple[str, str]:
    """The half that a tensor is: (name of the layer, "A" or "B")."""
    what = f"{tensor.file}: {tensor.name}"
    if "lora_magnitude_vector" in tensor.name:
        raise ValueError(f"{what} belongs to DoRA, which is not supported; merge the adapter")
    if "embed_tokens" in tensor.name or "lm_head" in tensor.name:
        raise ValueError(
            f"{what} changes the embedding or the head; only linear layers of attention and MLP can be adapted; "
            "merge the adapter into the model"
        )
    found = _NAME.fullmatch(tensor.name)
    if found is None:
        raise ValueError(
            f"{what} is not the half of a LoRA layer, base_model.model.LAYER.lora_A.weight or .lora_B.weight"
        )
    renamed = layers.rename(f"{found['layer']}.weight")
    layer = None if renamed is None else renamed.removesuffix(".weight")
    if layer is None or layer not in layers.shapes:
        some = listed(list(layers.shapes))
        raise ValueError(
            f"{what} is of no layer that can be adapted here; there are {some}. Train without that layer, which PEFT's "
            "exclude_modules can name, or merge the adapter into the model"
        )
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{what} has dtype {tensor.dtype}; adapters are stored as floats")
    return layer, found["half"]


def _check_complete(
    config: PeftConfig,
    halves: Mapping[str, Mapping[str, StoredTensor]],
    names: Mapping[str, str],
    layers: AdaptedLayers,
) -> None:
    """Raises ValueError unless exactly the targeted layers have halves, and both."""
    file = config.file.parent / TENSORS
    for layer, found in halves.items():
        if len(found) == 1:
            (half,) = found
            other = found[half].name.replace(f".lora_{half}.", f".lora_{'AB'.replace(half, '')}.")
            raise ValueError(f"{file} has {found[half].name} and lacks the other half, {other}")
        if not config.targets(names[layer]):
            raise ValueError(
                f"{file} has {found['A'].name}, but target_modules of {config.file} does not name its layer"
            )
    absent = [name for name in layers.shapes if name not in halves and config.targets(name)]
    if absent:
        raise ValueError(
            f"{file} lacks the tensors of {len(absent)} layers that target_modules of {config.file} names: "
            f"{listed(absent)}"
        )


def _read(
    config: PeftConfig,
    name: str,
    halves: Mapping[str, StoredTensor],
    shape: tuple[int, int],
    max_rank: int,
) -> LowRank:
    rank, (num_out, num_in) = config.rank_of(name), shape
    if rank > max_rank:
        raise ValueError(
            f"{config.file}: rank {rank} of {name} exceeds max_lora_rank={max_rank}; start the engine with "
            f"max_lora_rank={rank}"
        )
    for half, wanted in (("A", (rank, num_in)), ("B", (num_out, rank))):
        if halves[half].shape != wanted:
            raise ValueError(
                f"{halves[half].file}: {halves[half].name} has shape {halves[half].shape}; the model and "
                f"{CONFIG} say {wanted}"
            )
    a, b = (halves[half].read().astype(np.float32) for half in "AB")
    for half, array in (("A", a), ("B", b)):
        if not np.isfinite(array).all():
            raise ValueError(
                f"{halves[half].file}: {halves[half].name} has values that are not finite"
            )
    return LowRank(a, b * np.float32(config.scale_of(name)))
