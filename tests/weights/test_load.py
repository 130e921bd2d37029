"""Loading: what arrives, how little is read and held, and the error for everything that can be
wrong.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.models.registry import build
from jaxpage.weights import restore
from jaxpage.weights.load import load
from jaxpage.weights.safetensors import StoredTensor, open_checkpoint
from jaxpage.weights.spec import variables
from tests import checkpoints


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def broken(llama, tmp_path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def abstract(path: Path, dtype: str = "float32") -> nnx.Module:
    return build(checkpoints.config(path), dtype=dtype)


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in variables(model).items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "model.safetensors")


def rewrite(path: Path, **changes: np.ndarray | None) -> None:
    """Replace, add or (None) remove tensors; `__` in a keyword stands for the dot in a name."""
    stored = tensors(path)
    for keyword, array in changes.items():
        stored.pop(keyword.replace("__", "."), None)
        if array is not None:
            stored[keyword.replace("__", ".")] = array
    safetensors.numpy.save_file(stored, path / "model.safetensors")


def shard(path: Path, num_files: int = 3) -> None:
    """Split `model.safetensors` into several files with an index."""
    stored = tensors(path)
    (path / "model.safetensors").unlink()
    placement = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in set(placement.values()):
        part = {name: array for name, array in stored.items() if placement[name] == file}
        safetensors.numpy.save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placement}))


def refused(path: Path, message: str) -> None:
    model = abstract(path)
    with pytest.raises(ValueError, match=message):
        load(model, path, use_tqdm=False)
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)  # nothing was begun


def test_every_parameter_is_the_tensor_of_its_name(llama):
    loaded, stored = values(load(abstract(llama), llama, use_tqdm=False)), tensors(llama)
    assert loaded.keys() == stored.keys()
    assert all(np.array_equal(loaded[name], stored[name]) for name in stored)


def test_weights_are_cast_to_the_declared_dtype(llama):
    loaded, stored = (
        values(load(abstract(llama, "bfloat16"), llama, use_tqdm=False)),
        tensors(llama),
    )
    for name, array in loaded.items():
        assert array.dtype == jnp.bfloat16
        assert np.array_equal(array, stored[name].astype(jnp.bfloat16))


def test_bfloat16_files_load(llama, broken):
    rewrite(
        broken, **{n.replace(".", "__"): a.astype(jnp.bfloat16) for n, a in tensors(llama).items()}
    )
    from_bf16 = values(load(abstract(broken), broken, use_tqdm=False))
    expected = values(load(abstract(llama, "bfloat16"), llama, use_tqdm=False))
    assert all(np.array_equal(from_bf16[n], expected[n].astype(np.float32)) for n in expected)


def test_sharded_checkpoint_equals_the_single_file(llama, broken):
    shard(broken)
    single = values(load(abstract(llama), llama, use_tqdm=False))
    sharded = values(load(abstract(broken), broken, use_tqdm=False))
    assert all(np.array_equal(single[name], sharded[name]) for name in single)


def test_a_filled_model_can_be_loaded_again(llama, broken):
    model = load(abstract(llama), llama, use_tqdm=False)
    rewrite(broken, model__norm__weight=np.full(32, 7, np.float32))
    assert np.all(values(load(model, broken, use_tqdm=False))["model.norm.weight"] == 7)


@pytest.mark.parametrize("stored", ["absent", "equal"])
def test_tied_model_loads_with_or_without_its_head(stored, tmp_path):
    path = checkpoints.build("qwen2", 0, tmp_path)
    if stored == "equal":
        rewrite(path, lm_head__weight=tensors(path)["model.embed_tokens.weight"])
    model = load(abstract(path), path, use_tqdm=False)
    assert "lm_head.weight" not in variables(model)


def test_tied_model_loads_from_its_head_alone(tmp_path):
    path = checkpoints.build("qwen2", 0, tmp_path)
    table = tensors(path)["model.embed_tokens.weight"]
    rewrite(path, model__embed_tokens__weight=None, lm_head__weight=table)
    loaded = values(load(abstract(path), path, use_tqdm=False))
    np.testing.assert_array_equal(loaded["model.embed_tokens.weight"], table)


def test_tied_model_with_another_head_is_refused(tmp_path):
    path = checkpoints.build("qwen2", 0, tmp_path)
    head = tensors(path)["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    rewrite(path, lm_head__weight=head)
    refused(path, "ties the embeddings, but lm_head.weight differs")


def test_rope_frequencies_of_old_checkpoints_are_ignored(broken):
    rewrite(broken, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    assert len(values(load(abstract(broken), broken, use_tqdm=False))) == len(tensors(broken)) - 1


def test_missing_tensors_are_named(broken):
    rewrite(broken, model__layers__1__mlp__up_proj__weight=None, lm_head__weight=None)
    refused(broken, "lacks lm_head.weight, model.layers.1.mlp.up_proj.weight")


def test_surplus_tensors_are_named(broken):
    rewrite(broken, model__layers__0__self_attn__q_proj__bias=np.zeros(32, np.float32))
    refused(broken, "has model.layers.0.self_attn.q_proj.bias, which the model does not know")


def test_misshaped_tensor_is_named_with_both_shapes(broken):
    rewrite(broken, model__norm__weight=np.zeros(33, np.float32))
    refused(broken, r"model.norm.weight has shape \[33\] .* wants \[32\]")


@pytest.mark.parametrize("rows", [-1, 1])
def test_misshaped_fused_tensor_is_named(rows, tmp_path):
    path = checkpoints.build("phi3", 0, tmp_path)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    fused = tensors(path)[name]
    fused = np.concatenate([fused, fused])[: len(fused) + rows]
    rewrite(path, **{name.replace(".", "__"): fused})
    refused(path, f"{name} has {len(fused)} rows in the checkpoint")


def test_quantised_tensor_is_refused(broken):
    shape = tensors(broken)["model.layers.0.mlp.up_proj.weight"].shape
    rewrite(broken, model__layers__0__mlp__up_proj__weight=np.zeros(shape, np.int8))
    refused(broken, "up_proj.weight is stored as int8, but config.json does not say how")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "awq, 3 bits, groups of 128"),
        ({"quant_method": "quark"}, "quark"),
        ({"bits": 8}, "no quant_method, 8 bits"),
    ],
)
def test_a_quantised_checkpoint_is_told_to_be_one_and_how(broken, quantization, message):
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"] = quantization
    (broken / "config.json").write_text(json.dumps(config))
    refused(broken, rf"the checkpoint is quantised \({message}\), .* bfloat16")


@pytest.mark.parametrize("suffix", ["qweight", "weight_scale_inv", "weight_packed"])
def test_quantised_tensors_tell_without_a_config(broken, suffix):
    name = f"model__layers__0__mlp__up_proj__{suffix}"
    rewrite(broken, **{name: np.zeros((4, 4), np.int32)})
    refused(broken, f"quantised, as it has .*up_proj.{suffix}, .* no quantization_config")


def add_unsupported(path: Path, name: str, dtype: str = "F8_E8M0") -> None:
    """Add or replace a tensor of 64 values, in half as many bytes if they have 4 bits."""
    file = path / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    num_bytes = 32 if dtype == "F4" else 64
    end = len(raw) - start
    header[name] = {"dtype": dtype, "shape": [64], "data_offsets": [end, end + num_bytes]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:] + bytes(num_bytes))


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4", "C64"])
def test_a_dtype_that_is_not_supported_is_named_with_its_tensor(dtype, broken):
    add_unsupported(broken, "model.norm.weight", dtype)
    refused(broken, rf"model.norm.weight .* has dtype {dtype}, which is not supported")


def test_tensors_that_are_not_read_may_have_any_dtype(broken):
    add_unsupported(broken, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert values(load(abstract(broken), broken, use_tqdm=False))


def test_truncated_file_is_refused_wherever_it_ends(broken):
    file = broken / "model.safetensors"
    content = file.read_bytes()
    for size in [0, 3, 8, 100, len(content) // 2, len(content) - 1]:
        file.write_bytes(content[:size])
        refused(broken, "truncated")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_harmless_never_a_crash(data, llama, tmp_path_factory):
    content = bytearray((llama / "model.safetensors").read_bytes())
    header_len = int.from_bytes(content[:8], "little")
    place = data.draw(st.integers(0, header_len + 7))
    content[place] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_bytes(content)
    try:
        for tensor in open_checkpoint(folder).values():
            tensor.read()
    except ValueError as error:
        assert "model.safetensors" in str(error)


def test_index_that_lists_an_absent_file_is_refused(broken):
    shard(broken)
    (broken / "part-1.safetensors").unlink()
    refused(broken, "lists part-1.safetensors, which is not in")


def test_index_that_misplaces_a_tensor_is_refused(broken):
    shard(broken)
    index = broken / "model.safetensors.index.json"
    placement = json.loads(index.read_text())["weight_map"]
    placement["model.norm.weight"] = "part-0.safetensors"
    placement["lm_head.weight"] = "part-1.safetensors"
    index.write_text(json.dumps({"weight_map": placement}))
    refused(broken, "but it does not")


def test_index_that_leaves_the_folder_is_refused(broken):
    index = broken / "model.safetensors.index.json"
    (broken / "model.safetensors").rename(broken.parent / "model.safetensors")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    refused(broken, "which is not a file in")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_damaged_index_is_refused(text, broken):
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors.index.json").write_text(text)
    refused(broken, "is not a safetensors index")


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_never_opened(broken, tmp_path):
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    refused(broken, "only pytorch_model.bin: pickle files can run code and are never loaded")
    assert not (tmp_path / "sprung").exists()


def test_folder_without_weights_is_refused(broken, tmp_path):
    (broken / "model.safetensors").unlink()
    refused(broken, "has neither model.safetensors nor")
    with pytest.raises(ValueError, match="there is no folder"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_progress_counts_every_byte_of_the_checkpoint(family, tmp_path, monkeypatch):
    path = checkpoints.build(family, 0, tmp_path)
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.updates = options, []
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, amount):
            self.updates.append(amount)

    monkeypatch.setattr(restore, "tqdm", Bar)
    load(abstract(path), path)
    num_bytes = sum(array.nbytes for array in tensors(path).values())
    assert bars[0].options["total"] == sum(bars[0].updates) == num_bytes
    assert not bars[0].options["disable"]


def test_fused_tensors_are_read_slice_by_slice(tmp_path, monkeypatch):
    path = checkpoints.build("phi3", 0, tmp_path)
    sizes = recorded_reads(monkeypatch)
    loaded = values(load(abstract(path), path, use_tqdm=False))
    fused = tensors(path)["model.layers.0.self_attn.qkv_proj.weight"]
    parts = [loaded[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert np.array_equal(np.concatenate(parts), fused)
    read = sizes["model.layers.0.self_attn.qkv_proj.weight"]
    assert sorted(read) == sorted(part.nbytes for part in parts)
    assert len(sizes["model.layers.0.mlp.gate_up_proj.weight"]) == 2


def recorded_reads(monkeypatch) -> dict[str, list[int]]:
    """Bytes of each read, by tensor, of everything loaded from now on."""
    sizes: dict[str, list[int]] = {}
    read = StoredTensor.read

    def recording(self, index=()):
        array = read(self, index)
        sizes.setdefault(self.name, []).append(array.nbytes)
        return array

    monkeypatch.setattr(StoredTensor, "read", recording)
    return sizes


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_peak_host_memory_is_about_one_tensor(dtype, tmp_path, monkeypatch):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1000}
    path = checkpoints.build("llama", 0, tmp_path, num_hidden_layers=6, **sizes)
    stored = tensors(path)
    largest = max(array.nbytes for array in stored.values())
    assert sum(array.nbytes for array in stored.values()) > 20 * largest

    # The CPU back end adopts NumPy's memory; a copy tells host and device apart again.
    make = jax.make_array_from_callback
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *args: jnp.array(make(*args), copy=True)
    )
    del stored
    model = abstract(path, dtype)
    load(model, path, use_tqdm=False)  # compiles the copies
    tracemalloc.start()
    load(model, path, use_tqdm=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One tensor and the one before it: jaxlib drops its reference to that at the next transfer.
    assert peak < 2.1 * largest + 200_000
