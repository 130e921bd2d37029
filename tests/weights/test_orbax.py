"""Orbax checkpoints that plain Orbax wrote, in every layout: the same model as its safetensors, and an error for
everything that can be wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from jaxpage.models.registry import build
from jaxpage.weights.load import load
from jaxpage.weights.spec import variables
from tests import checkpoints
from tests.weights import trees

TUNIX = [("llama", 0), ("qwen2", 0), ("qwen2", 2), ("qwen3", 0)]
MAXTEXT = [("llama", 0), ("llama", 1), ("mistral", 0), ("qwen2", 1), ("qwen3", 2)]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in variables(model).items()}


def abstract(folder: Path, dtype: str = "float32") -> nnx.Module:
    return build(checkpoints.config(folder), dtype=dtype)


def assert_same(model: nnx.Module, folder: Path, *, atol: float = 0.0) -> None:
    stored = tensors(folder)
    for path, value in values(model).items():
        np.testing.assert_allclose(
            value, stored[path], atol=atol, rtol=1e-6 if atol else 0, err_msg=path
        )


def mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama, tmp_path_factory) -> Path:
    """The same as an NNX state that Orbax saved."""
    model = load(abstract(llama), llama, use_tqdm=False)
    return trees.save(nnx.state(model, nnx.Param), tmp_path_factory.mktemp("nnx") / "run")


@pytest.fixture
def broken(plain, tmp_path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def test_an_nnx_state_loads_as_it_is(llama, plain):
    assert_same(load(abstract(llama), plain, use_tqdm=False), llama)


@pytest.mark.parametrize(("family", "variant"), TUNIX)
def test_tunix(family, variant, tmp_path):
    folder = checkpoints.build(family, variant, tmp_path / "hf")
    tree = trees.tunix(tensors(folder), checkpoints.config(folder))
    run = trees.save(tree, tmp_path / "run")
    assert_same(load(abstract(folder), run, use_tqdm=False), folder)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("family", "variant"), MAXTEXT)
def test_maxtext(family, variant, stacked, tmp_path):
    folder = checkpoints.build(family, variant, tmp_path / "hf")
    tree = trees.maxtext(tensors(folder), checkpoints.config(folder), stacked=stacked)
    run = trees.save({"params": {"params": tree}}, tmp_path / "run")
    assert_same(load(abstract(folder), run, use_tqdm=False), folder, atol=1e-6)
