"""Orbax checkpoints that plain Orbax wrote, in every layout: the same model as its safetensors, and an error for
everything that can be wrong.
"""

from __future__ import annotations

import gc
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from jaxpage.models.registry import build
from jaxpage.weights import restore
from jaxpage.weights.load import load
from jaxpage.weights.orbax import Checkpoint, find_tree
from jaxpage.weights.spec import specs, variables
from tests import checkpoints, picture_models
from tests.weights import trees

# Where one array cannot be read, Orbax leaves the reads of others to end when nobody waits for them any more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# (family, variant of tests/checkpoints.py): between them tied and untied, biases, norms of heads, Llama 3.1's RoPE.
TUNIX = [
    ("llama", 0),
    pytest.param("qwen2", 0, marks=pytest.mark.slow),
    pytest.param("qwen3", 0, marks=pytest.mark.slow),
]
MAXTEXT = [
    ("llama", 1, True),
    ("qwen2", 1, False),
    *(
        pytest.param(*case, stacked, marks=pytest.mark.slow)
        for case in (("llama", 0), ("llama", 1), ("mistral", 0), ("qwen2", 1), ("qwen3", 2))
        for stacked in (False, True)
    ),
]


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


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama, tmp_path_factory) -> Path:
    """The same as an NNX state that Orbax saved."""
    model = load(abstract(llama), llama, use_tqdm=False)
    return trees.save(nnx.state(model, nnx.Param), tmp_path_factory.mktemp("nnx") / "run")


def test_an_nnx_state_loads_as_it_is(llama, plain):
    assert_same(load(abstract(llama), plain, use_tqdm=False), llama)


def run_of(tree: object, tmp_path: Path, **options: bool) -> Path:
    return trees.save(tree, tmp_path / "run", **options)


@pytest.mark.parametrize(("family", "variant"), TUNIX)
def test_tunix(family, variant, tmp_path):
    folder = checkpoints.build(family, variant, tmp_path / "hf")
    run = run_of(trees.tunix(tensors(folder), checkpoints.config(folder)), tmp_path)
    assert_same(load(abstract(folder), run, use_tqdm=False), folder)


@pytest.mark.parametrize(("family", "variant", "stacked"), MAXTEXT)
def test_maxtext(family, variant, stacked, tmp_path):
    folder = checkpoints.build(family, variant, tmp_path / "hf")
    tree = trees.maxtext(tensors(folder), checkpoints.config(folder), stacked=stacked)
    run = run_of({"params": {"params": tree}}, tmp_path)
    assert_same(load(abstract(folder), run, use_tqdm=False), folder, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, 2])  # of several query heads for a KV head
@pytest.mark.parametrize("layout", ["tunix", "apart", "stacked"])
def test_gemma3(layout, variant, tmp_path):
    """8 layers are one round of MaxText's scan and two beyond it."""
    sizes = {"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 8}
    plain = {"attention_bias": False, "tie_word_embeddings": True}
    folder = checkpoints.build("gemma3", variant, tmp_path / "hf", **sizes, **plain)
    config = checkpoints.config(folder)
    tree = trees.tunix_gemma3(tensors(folder), config)
    if layout != "tunix":
        tree = {"params": trees.maxtext(tensors(folder), config, stacked=layout == "stacked")}
    assert_same(load(abstract(folder), run_of(tree, tmp_path), use_tqdm=False), folder, atol=2e-6)


@pytest.mark.slow
def test_gemma3_with_as_many_kv_heads_as_heads(tmp_path):
    sizes = {"num_key_value_heads": 4, "attention_bias": False}
    folder = checkpoints.build("gemma3", 0, tmp_path / "hf", **sizes)
    tree = trees.tunix_gemma3(tensors(folder), checkpoints.config(folder))
    assert "qkv_einsum" in tree["layers"]["0"]["attn"]
    assert_same(load(abstract(folder), run_of(tree, tmp_path), use_tqdm=False), folder)


@pytest.mark.slow
def test_of_a_gemma3_that_sees_tunix_has_the_text_part(tmp_path):
    hf = picture_models.save(picture_models.gemma3_config(), tmp_path / "hf", seed="orbax")
    config = checkpoints.config(hf)
    text = values(load(build(config, dtype="float32", pictures=False), hf, use_tqdm=False))
    run = run_of(trees.tunix_gemma3(text, config.get_text_config()), tmp_path)
    with pytest.raises(ValueError, match=r'tower is not read.* limit_mm_per_prompt={"image": 0}'):
        load(build(config, dtype="float32"), run, use_tqdm=False)
    found = values(load(build(config, dtype="float32", pictures=False), run, use_tqdm=False))
    assert found.keys() == text.keys()
    assert all(np.array_equal(found[path], text[path]) for path in text)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}])
def test_other_file_formats_of_orbax(llama, options, tmp_path):
    run = run_of(trees.nested(tensors(llama)), tmp_path, **options)
    assert_same(load(abstract(llama), run, use_tqdm=False), llama)


@pytest.mark.slow
def test_layers_stacked_first_and_a_padded_vocabulary(llama, tmp_path):
    tree = trees.maxtext(
        tensors(llama), checkpoints.config(llama), stacked=True, axis=0, more_rows=6
    )
    run = run_of({"params": tree}, tmp_path)
    assert_same(load(abstract(llama), run, use_tqdm=False), llama, atol=1e-6)


def test_a_step_of_a_trainer_is_read_without_its_optimizer(llama, tmp_path, monkeypatch):
    """As Tunix saves it: `model_params` beside `optimizer_state`, below the step's number."""
    tree = trees.tunix(tensors(llama), checkpoints.config(llama))
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        trees_of_step = {
            "model_params": ocp.args.PyTreeSave(tree),
            "optimizer_state": ocp.args.PyTreeSave({"mu": tree}),
        }
        manager.save(7, args=ocp.args.Composite(**trees_of_step))
    for folder in ("7", "7/model_params"):
        assert_same(load(abstract(llama), tmp_path / "runs" / folder, use_tqdm=False), llama)
    with pytest.raises(ValueError, match="has the steps 7 of an Orbax checkpoint; name one"):
        load(abstract(llama), tmp_path / "runs", use_tqdm=False)


@pytest.mark.slow
def test_a_whole_training_state_is_read_without_its_optimizer(llama, tmp_path, monkeypatch):
    """MaxText's `items`: weights, optimizer and random states in one tree."""
    tree = trees.maxtext(tensors(llama), checkpoints.config(llama), stacked=True)
    state = {
        "params": {"params": tree | {"rngs": {"key": np.zeros(2, np.uint32)}}},
        "opt_state": [None, {"mu": {"params": tree}, "nu": {"params": tree}}],
        "step": 3,
    }
    names = []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda s, w: names.extend(w) or read(s, w))
    assert_same(load(abstract(llama), run_of(state, tmp_path), use_tqdm=False), llama, atol=1e-6)
    assert names and all(name.startswith("params.params.") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nnx", "tunix", "maxtext"])
def test_every_device_gets_its_own_shards(layout, llama, tmp_path):
    config, hf = checkpoints.config(llama), tensors(llama)
    tree = {
        "nnx": lambda: trees.nested(hf),
        "tunix": lambda: trees.tunix(hf, config),
        "maxtext": lambda: {"params": trees.maxtext(hf, config, stacked=True)},
    }[layout]()
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    model = load(abstract(llama), run_of(tree, tmp_path), mesh=mesh, use_tqdm=False)
    assert_same(model, llama, atol=1e-6)
    wanted = specs(model)
    for path, variable in variables(model).items():
        assert variable.get_value().sharding == wanted[path].sharding(mesh)


def test_arrays_are_read_a_part_at_a_time_large_ones_first(llama, tmp_path, monkeypatch):
    tree = trees.maxtext(tensors(llama), checkpoints.config(llama), stacked=True)
    run = run_of({"params": tree}, tmp_path)
    monkeypatch.setattr(restore, "_LEAST_READ", 0)
    reads = []
    read = Checkpoint.read

    def recording(self, wanted):
        reads.append([self.arrays[name].num_bytes for name in wanted])
        return read(self, wanted)

    monkeypatch.setattr(Checkpoint, "read", recording)
    load(abstract(llama), run, use_tqdm=False)
    sizes = [size for part in reads for size in part]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(tree))
    assert all(len(part) == 1 or sum(part) <= sum(sizes) // 16 for part in reads)


def test_weights_are_cast_to_the_declared_dtype(llama, plain):
    stored = tensors(llama)
    for path, value in values(load(abstract(llama, "bfloat16"), plain, use_tqdm=False)).items():
        assert np.array_equal(value, stored[path].astype(ml_dtypes.bfloat16))


def refused(folder: Path, llama: Path, message: str) -> None:
    model = load(abstract(llama), llama, use_tqdm=False)
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(ValueError, match=message):
        load(model, folder, use_tqdm=False)
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))  # it is as it was


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "NNX's layout .*: it lacks model.norm.weight"),
        (
            {"model.layers.1.mlp.bias": np.zeros(3, np.float32)},
            r"it has model.layers.1.mlp.bias \[3\], which the model does not know",
        ),
        (
            {"model.norm.weight": np.zeros(33, np.float32)},
            r"model.norm.weight has shape \[33\] .* model.norm.weight of the model, \[32\], wants \[32\]",
        ),
        ({"model.norm.weight": np.zeros(32, np.int8)}, "model.norm.weight is stored as int8"),
        ({"model.lora_a": np.zeros(3, np.float32)}, "has model.lora_a: merge LoRA"),
        ({"model.embed_tokens.weight": None}, "its layout is not known; it has 20 arrays"),
    ],
)
def test_what_does_not_fit_is_named(change, message, llama, tmp_path):
    changed = {name: x for name, x in (tensors(llama) | change).items() if x is not None}
    refused(run_of(trees.nested(changed), tmp_path), llama, message)


@pytest.mark.slow
def test_misshaped_arrays_of_trainers_are_named_with_both_shapes(llama, tmp_path):
    config = checkpoints.config(llama)
    tree = trees.tunix(tensors(llama), config)
    tree["layers"]["1"]["attn"]["k_proj"]["w"] = np.zeros((32, 4, 8), np.float32)
    message = (
        r"layers.1.attn.k_proj.w has shape \[32, 4, 8\] in the checkpoint; "
        r"model.layers.1.self_attn.k_proj.weight of the model, \[16, 32\], wants \[32, 2, 8\] there"
    )
    refused(run_of(tree, tmp_path), llama, message)
    tree = trees.maxtext(tensors(llama), config, stacked=True)
    kernel = tree["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    tree["decoder"]["layers"]["mlp"]["wi_0"]["kernel"] = np.repeat(kernel, 2, axis=1)
    message = r"wi_0.kernel has shape \[32, 4, 72\] .*gate_proj.weight .* wants \[32, 2, 72\]"
    refused(trees.save({"params": tree}, tmp_path / "other"), llama, message)


@contextmanager
def unfinished_reads():
    """Where one array cannot be read, Orbax leaves the reads of others unfinished, and Python complains of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)
        yield
        gc.collect()


@pytest.mark.slow
def test_truncated_arrays_are_named(llama, tmp_path):
    run = run_of(trees.nested(tensors(llama)), tmp_path, use_ocdbt=False)
    (file,) = (run / "model.layers.1.mlp.up_proj.weight").glob("[0-9]*")
    message = r"model.layers.1.mlp.up_proj.weight of shape \[72, 32\] cannot be read"
    with unfinished_reads():
        file.write_bytes(file.read_bytes()[:-100])
        refused(run, llama, message)
        file.unlink()
        refused(run, llama, message)


@pytest.mark.slow
def test_every_truncated_file_is_an_error_or_was_not_needed(llama, plain, tmp_path):
    """A file that Orbax had merged into others may be gone without harm; values are never wrong."""
    for number, file in enumerate(sorted(f for f in plain.rglob("*") if f.is_file())):
        broken = Path(shutil.copytree(plain, tmp_path / str(number)))
        part = broken / file.relative_to(plain)
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        model = abstract(llama)
        with unfinished_reads():
            try:
                load(model, broken, use_tqdm=False)
            except ValueError as error:
                assert str(broken) in str(error)
                assert isinstance(jax.tree.leaves(nnx.state(model))[0], jax.ShapeDtypeStruct)
            else:
                assert_same(model, llama)


def test_an_unfinished_checkpoint_is_told(llama, plain, tmp_path):
    broken = Path(shutil.copytree(plain, tmp_path / "copy"))
    (broken / "_METADATA").unlink()
    refused(broken, llama, "without _METADATA: it is incomplete")


def test_several_trees_must_be_told_apart(plain, tmp_path):
    for name in ("actor", "critic"):
        shutil.copytree(plain, tmp_path / name)
    with pytest.raises(ValueError, match="several trees of arrays: actor, critic; name one"):
        find_tree(tmp_path)


@pytest.mark.slow
def test_families_that_a_trainer_lacks_are_refused(tmp_path):
    folder = checkpoints.build("mistral", 0, tmp_path / "hf")
    run = run_of(trees.tunix(tensors(folder), checkpoints.config(folder)), tmp_path)
    with pytest.raises(ValueError, match="Tunix's checkpoints of MistralForCausalLM are not"):
        load(abstract(folder), run, use_tqdm=False)
