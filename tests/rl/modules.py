"""A tiny module of ours with random parameters and its config.json, the same parameters in the layouts of trainers, and
a sampler of the size of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.rl import Sampler
from jaxpage.weights.dummy import initialise
from jaxpage.weights.spec import variables
from tests import checkpoints
from tests.few_programs import few_programs
from tests.weights import trees

VOCAB_SIZE = checkpoints.VOCAB_SIZE
OPTIONS = {
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 140,
}


def write_config(path: Path, *, num_layers: int = 2) -> Path:
    """config.json of a Qwen 3, float32."""
    import transformers

    sizes = checkpoints.VARIANTS["qwen3"][0] | {"num_hidden_layers": num_layers}
    config = transformers.Qwen3Config(
        **sizes,
        vocab_size=VOCAB_SIZE,
        intermediate_size=72,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(path)
    return path


def make_module(path: Path, seed: int = 0, dtype: str = "float32") -> CausalLM:
    """The module of a config.json, whose logits are not flat."""
    module = registry.build(checkpoints.config(path), dtype=dtype, max_model_len=128)
    initialise(module, seed=seed)
    rng = np.random.default_rng(seed)
    for name, variable in variables(module).items():
        shape = variable.get_value().shape
        wide = 1.0 + 0.3 * rng.normal(size=shape) if "norm" in name else rng.normal(size=shape)
        if "norm" not in name:
            wide *= 0.3 if "embed" in name else 1.5 * shape[-1] ** -0.5
        variable.set_value(jax.device_put(wide.astype(dtype)))
    return module


def make_sampler(module: nnx.Module, path: Path, **options: Any) -> Sampler:
    """With two step sizes."""
    with few_programs():
        sampler = Sampler(module, str(path), **(OPTIONS | options))
    sampler.wait_until_warm()
    return sampler


class Holder(nnx.Module):
    """A tree of arrays as an NNX module with the same names, as trainers have theirs."""

    def __init__(self, tree: dict[str, Any]):
        for name, value in tree.items():
            if isinstance(value, dict) and set(value) == {str(i) for i in range(len(value))}:
                setattr(self, name, nnx.List([Holder(value[str(i)]) for i in range(len(value))]))
            elif isinstance(value, dict):
                setattr(self, name, Holder(value))
            else:
                setattr(self, name, nnx.Param(jax.device_put(value)))


def change(module: nnx.Module, factor: float = 1.1) -> None:
    """Replace every parameter, as a training step does."""
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_value(variable.get_value() * factor)


def in_layout(layout: str, module: CausalLM, path: Path) -> dict[str, Any]:
    """The module's parameters as a tree of "tunix", "maxtext" or "maxtext stacked"."""
    tensors = {name: np.asarray(each.get_value()) for name, each in variables(module).items()}
    config = checkpoints.config(path)
    if layout == "tunix":
        return trees.tunix(tensors, config)
    return trees.maxtext(tensors, config, stacked=layout == "maxtext stacked")
