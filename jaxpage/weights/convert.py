"""`jaxpage convert`: writes a checkpoint in another format, with the same values.

Knows which formats can be read and written. Dtypes never change, and nothing is computed except for a trainer's layout;
safetensors to Orbax and back is bitwise the same. Quantised weights are dequantised to config.json's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.hub import is_url, local_folder, small_files
from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import build, is_idle, tensor_name
from jaxpage.weights.load import open_safetensors
from jaxpage.weights.orbax import find_tree, open_tree
from jaxpage.weights.quantized_layers import forget
from jaxpage.weights.restore import Wanted, find_places, read_parameters
from jaxpage.weights.safetensors import open_checkpoint
from jaxpage.weights.save import write
from jaxpage.weights.spec import listed, specs
from jaxpage.weights.stored import Stored


@dataclass(frozen=True, kw_only=True)
class ConvertFlags:
    """Write a checkpoint in another format: safetensors as Orbax, and Orbax of NNX, Tunix or MaxText as safetensors."""

    source: tyro.conf.Positional[
        str
    ]  # a folder, a name on the Hugging Face hub, or gs://... of Orbax
    target: tyro.conf.Positional[Path]  # a folder that does not exist
    # of the target; none: the other format
    format: Literal["safetensors", "orbax"] | None = None
    # a folder, or a name on the hub, with config.json and the tokenizer; none: the source
    hf_config_path: str | None = None


def main(flags: ConvertFlags) -> None:
    """Convert, and print what was written. Raises ValueError."""
    path = convert(
        flags.source, flags.target, format=flags.format, hf_config_path=flags.hf_config_path
    )
    print(path)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    format: str | None = None,
    hf_config_path: str | Path | None = None,
) -> Path:
    """Write the checkpoint `source` to the folder `target`. Returns the folder.

    format: "safetensors" or "orbax"; None: the other one than that of `source`. hf_config_path: where config.json and
    the tokenizer are; None: in `source`. Needs host memory for the weights. Raises ValueError for a checkpoint that
    does not fit its config.json or is damaged, and if `target` exists.
    """
    if Path(target).exists():
        raise ValueError(f"{target} exists already; name another folder or remove it")
    source = local_folder("source", str(source))
    files = source
    if hf_config_path is not None or is_url(source):
        files = small_files(str(hf_config_path or source))
    hf_config = load_hf_config(files)
    model = build(hf_config, dtype="float32", pictures=False)
    tree = find_tree(source)
    arrays = _of_safetensors(model, source, hf_config) if tree is None else _of_orbax(model, tree)
    other = "orbax" if tree is None else "safetensors"
    return write(arrays, model.config, target, files=files, format=format or other)


def _of_safetensors(model: CausalLM, folder: str, hf_config: Any) -> dict[str, Any]:
    tensors = open_checkpoint(folder)
    unused = [
        name
        for name in tensors
        if tensor_name(model.config, name) is None and not is_idle(model.config, name)
    ]
    if unused:
        raise ValueError(
            f"{folder} has {listed(unused)}: only the text part of it can be converted"
        )
    # Of a layer's experts the first may be 16-bit floats and others quantised, which are read as float32.
    in_float32 = {
        tensor_name(model.config, name)
        for name, tensor in tensors.items()
        if tensor.is_supported and tensor.dtype == np.float32
    }
    dtype = _dtype(hf_config)

    def read(stored: Stored) -> np.ndarray:
        array = stored.read()
        is_dequantised = stored.dtype == np.float32 and stored.name not in in_float32
        return array.astype(dtype) if is_dequantised else array

    found = open_safetensors(model, folder, hf_config=hf_config)
    try:
        return {path: read(stored) for path, stored in found.items()}
    finally:
        forget()


def _dtype(hf_config: Any) -> np.dtype:
    """Of floats, according to config.json."""
    name = hf_config.get_text_config().dtype or hf_config.dtype or "float32"
    return np.dtype(jnp.dtype(str(name).removeprefix("torch.")))


def _of_orbax(model: CausalLM, tree: Any) -> dict[str, Any]:
    checkpoint, described = open_tree(tree), specs(model)
    places = find_places(model.config, described, checkpoint)
    wanted = {
        path: Wanted(spec.shape, np.dtype(checkpoint.arrays[places[path].array].dtype), None)
        for path, spec in described.items()
    }
    return dict(read_parameters(checkpoint, places, wanted))
