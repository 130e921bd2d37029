"""Saving and converting: Hugging Face to Orbax and back is bitwise the same; errors come before anything is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from jaxpage import cli, hub
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.demo import checkpoint
from jaxpage.engine_spec import make_engine_spec
from jaxpage.models.registry import build
from jaxpage.pooling.sentence_transformers import read_sentence_transformer
from jaxpage.tokenizer import load_tokenizer
from jaxpage.weights import orbax
from jaxpage.weights import save as save_module
from jaxpage.weights.convert import convert
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load, quantization_of_checkpoint
from jaxpage.weights.save import save
from jaxpage.weights.spec import variables
from jaxpage.weights.transform import join_projections
from tests import checkpoints, mixtures
from tests.quantized_checkpoints import FORMATS, write
from tests.weights import trees


def tensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in safetensors.numpy.load_file(file).items()}


def assert_bitwise(folder: Path, other: Path) -> None:
    stored, expected = tensors(folder), tensors(other)
    assert stored.keys() == expected.keys()
    for name, x in expected.items():
        assert stored[name].dtype == x.dtype and stored[name].shape == x.shape
        assert stored[name].tobytes() == x.tobytes(), name


@pytest.fixture(scope="module")
def demo() -> Path:
    """Qwen2 with tied embeddings, in bfloat16, with its tokenizer."""
    return Path(checkpoint())


def test_hugging_face_to_orbax_and_back_is_bitwise_the_same(demo, tmp_path, capsys):
    assert cli.main(["convert", str(demo), str(tmp_path / "orbax")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'orbax'}\n"
    assert not list((tmp_path / "orbax").rglob("*.safetensors"))
    assert cli.main(["convert", str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
    assert_bitwise(tmp_path / "back", demo)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / file).read_bytes() == (demo / file).read_bytes()
    names = {file.name for file in (tmp_path / "back").iterdir()}
    assert names == {file.name for file in demo.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant"), [("llama", 0), ("phi3", 0), ("gemma2", 1)])
def test_every_family_and_dtype_survives(family, variant, tmp_path):
    """Phi-3 fuses projections, which are apart in Orbax; some tensors are rounded to show that dtypes stay."""
    hf = checkpoints.build(family, variant, tmp_path / "hf")
    stored = tensors(hf)
    for name in stored:
        if "norm" in name:
            stored[name] = stored[name].astype(np.float16)
    safetensors.numpy.save_file(stored, hf / "model.safetensors")
    convert(hf, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    assert_bitwise(tmp_path / "back", hf)


@pytest.mark.slow
def test_a_trainers_checkpoint_becomes_safetensors(demo, tmp_path):
    config = checkpoints.config(demo)
    run = trees.save(trees.tunix(tensors(demo), config), tmp_path / "run")
    convert(run, tmp_path / "hf", hf_config_path=demo)
    assert_bitwise(tmp_path / "hf", demo)


def test_files_of_limited_size_have_an_index(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "_FILE_BYTES", 500_000)
    convert(demo, tmp_path / "copy", format="safetensors")
    files = sorted(file.name for file in (tmp_path / "copy").glob("*.safetensors"))
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(demo).values())
    assert_bitwise(tmp_path / "copy", demo)


@pytest.mark.slow
def test_orbax_itself_reads_what_was_saved(demo, tmp_path):
    """As the pure dict of the NNX state, on another mesh."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    hf_config = checkpoints.config(demo)
    model = load(build(hf_config, dtype="bfloat16"), demo, mesh=mesh, use_tqdm=False)
    save(model, tmp_path / "run", files=demo, format="orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        target = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        how = ocp.checkpoint_utils.construct_restore_args(target)
        restored = checkpointer.restore(
            tmp_path / "run", args=ocp.args.PyTreeRestore(target, restore_args=how)
        )
    expected = tensors(demo)
    other = initialise(build(hf_config, dtype="bfloat16"), seed=1)
    nnx.update(other, restored)
    again = load(build(hf_config, dtype="bfloat16"), tmp_path / "run", use_tqdm=False)
    for found in (other, again):
        for path, variable in variables(found).items():
            assert np.array_equal(np.asarray(variable.get_value()), expected[path])


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(demo, tmp_path):
    model = build(checkpoints.config(demo), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"embed_tokens.weight \[1903, 192\] has no value"):
        save(model, tmp_path / "run", files=demo, format="orbax")
    load(model, demo, use_tqdm=False)
    with pytest.raises(ValueError, match="format must be one of safetensors, orbax, got 'torch'"):
        save(model, tmp_path / "run", files=demo, format="torch")
    with pytest.raises(ValueError, match="has no config.json"):
        save(model, tmp_path / "run", files=tmp_path, format="orbax")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other exists already"):
        save(model, tmp_path / "other", files=demo, format="orbax")
    join_projections(model)
    with pytest.raises(ValueError, match="gate_up_proj.weight .* is what an engine made of other"):
        save(model, tmp_path / "run", files=demo, format="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_checkpoint_that_does_not_fit_is_not_converted(demo, tmp_path):
    source = Path(shutil.copytree(demo, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 380}))
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight has shape \[192, 384\]"):
        convert(source, tmp_path / "target")
    assert cli.main(["convert", str(demo), str(source)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_a_full_disk_is_told_in_one_line(demo, tmp_path, monkeypatch, capsys, format):
    """Before anything is written; or while it is written, if others fill the disk meanwhile."""
    args = ["convert", str(demo), str(tmp_path / "target"), "--format", format]
    deep = ["convert", str(demo), str(tmp_path / "new" / "target"), "--format", format]
    disk = SimpleNamespace(total=10**9, free=1_000_000)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: disk)
        for each in (args, deep):
            assert cli.main(each) == 2
            told = capsys.readouterr().err
            assert f"GB, but the disk of {tmp_path} has" in told and told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

    def full(*args, **options):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    if format == "safetensors":
        monkeypatch.setattr(save_module, "save_file", full)
        assert cli.main(args) == 2
        assert "model.safetensors cannot be written: I/O error: No space" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_sizes_is_taken(demo, tmp_path, monkeypatch):
    disk = SimpleNamespace(total=0, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: disk)
    convert(demo, tmp_path / "new" / "target")
    assert (tmp_path / "new" / "target" / "config.json").is_file()


@pytest.mark.slow
def test_an_engine_answers_alike_from_every_format(tmp_path):
    """Greedy tokens and log-probabilities of an engine on safetensors, NNX, Tunix and MaxText."""
    from jaxpage import SamplingParams

    hf = checkpoints.build("llama", 0, tmp_path / "hf")
    config, stored = checkpoints.config(hf), tensors(hf)
    trees.save(trees.nested(stored), tmp_path / "nnx")
    trees.save(trees.tunix(stored, config), tmp_path / "tunix")
    for stacked in (False, True):
        tree = {"params": {"params": trees.maxtext(stored, config, stacked=stacked)}}
        trees.save(tree, tmp_path / f"maxtext {stacked}")
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
    prompts = [[5, 6, 7], [3, 40, 100, 200, 13]]
    expected = checkpoints.answers(checkpoints.make_llm(hf), prompts, params)
    for name in ("nnx", "tunix", "maxtext False", "maxtext True"):
        llm = checkpoints.make_llm(tmp_path / name, hf_config_path=str(hf))
        got = checkpoints.answers(llm, prompts, params)
        checkpoints.assert_same_answers(got, expected, atol=1e-4)


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    """The folder that gs://bucket is."""

    def bucket_path(name: str) -> epath.Path:
        return epath.Path(tmp_path / name.removeprefix("gs://"))

    monkeypatch.setattr(hub, "bucket_path", bucket_path)
    monkeypatch.setattr(orbax, "bucket_path", bucket_path)
    return tmp_path / "bucket"


def test_a_model_in_a_bucket(demo, bucket, tmp_path):
    """Its small files are copied, its arrays are read where they are."""
    convert(demo, bucket / "run")
    options = EngineConfig(model="gs://bucket/run").with_local_files()
    assert options.model == "gs://bucket/run" and options.hf_config_path is not None
    names = {file.name for file in Path(options.hf_config_path).iterdir()}
    assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert "_METADATA" not in names
    again = options.with_local_files()
    assert again.hf_config_path == options.hf_config_path
    model = build(checkpoints.config(Path(options.hf_config_path)), dtype="bfloat16")
    load(model, options.model, use_tqdm=False)
    expected = tensors(demo)
    for path, variable in variables(model).items():
        assert np.array_equal(np.asarray(variable.get_value()), expected[path])
    convert("gs://bucket/run", tmp_path / "back")
    assert_bitwise(tmp_path / "back", demo)
    (bucket / "run" / "config.json").unlink()
    with pytest.raises(ValueError, match="gs://bucket/run/config.json does not exist; give hf_con"):
        EngineConfig(model="gs://bucket/run").with_local_files()


def test_every_chat_template_is_copied(demo, bucket, tmp_path):
    source = Path(shutil.copytree(demo, tmp_path / "source"))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    expected = load_tokenizer(str(source)).chat_template
    assert list(expected) == ["default", "tool_use"]
    converted = convert(source, bucket / "run")
    copied = EngineConfig(model="gs://bucket/run").with_local_files().hf_config_path
    for folder in (converted, copied):
        assert load_tokenizer(str(folder)).chat_template == expected


def test_a_bucket_without_the_package_that_reads_it(monkeypatch):
    def path(name: str) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(epath, "Path", path)
    with pytest.raises(ValueError, match="gs://bucket/run .* another package: .* gcsfs"):
        EngineConfig(model="gs://bucket/run").with_local_files()


def test_weights_alone_need_hf_config_path(demo, tmp_path):
    run = trees.save(trees.nested(tensors(demo)), tmp_path / "run")
    with pytest.raises(ValueError, match="config.json does not exist; .* hf_config_path"):
        load_hf_config(str(run))
    options = EngineConfig(model=str(run), hf_config_path=str(demo))
    spec = make_engine_spec(options, device=jax.devices()[0])
    assert spec.config.tokenizer == str(demo)
    assert spec.model.config.hidden_size == 192


def test_quantised_weights_are_dequantised_to_the_dtype_of_the_config(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    checkpoints.build("qwen3", 0, tmp_path / "source", **sizes)
    written = write(tmp_path / "source", tmp_path / "quantised", FORMATS["awq-g32"])
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "model.safetensors").symlink_to(tmp_path / "quantised/model.safetensors")
    path = tmp_path / "quantised"
    convert(path, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    convert(tmp_path / "alone", tmp_path / "direct", format="safetensors", hf_config_path=path)
    for name in ("back", "direct"):
        stored = tensors(tmp_path / name)
        assert stored.keys() == written.keys()
        for tensor, x in written.items():
            assert stored[tensor].dtype == np.float16
            np.testing.assert_array_equal(stored[tensor], x.astype(np.float16))
    for name in ("orbax", "back", "direct"):
        assert "quantization_config" not in json.loads(
            (tmp_path / name / "config.json").read_text()
        )


@pytest.mark.parametrize("which", ["0", "1"])
def test_experts_that_are_partly_floats_get_the_dtype_of_the_config(which, tmp_path):
    """Also where the first one is not quantised."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    mixtures.build("qwen3_moe", 0, tmp_path / "source", **sizes)
    ignored = ["lm_head", f"re:.*experts.{which}[.]"]
    form = FORMATS["awq-g32"]
    written = write(tmp_path / "source", tmp_path / "quantised", form, ignore=ignored)
    stored = tensors(convert(tmp_path / "quantised", tmp_path / "direct", format="safetensors"))
    assert stored.keys() == written.keys()
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(np.float16)}


def test_the_text_part_may_say_how_weights_are_quantised(demo, tmp_path):
    model = initialise(build(load_hf_config(str(demo)), dtype="float32"), seed=0)
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(model, tmp_path / "saved", files=tmp_path, format="safetensors")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {"text_config": {}}


def test_floats_beside_the_config_of_a_quantised_checkpoint(demo, tmp_path):
    convert(demo, tmp_path / "orbax")
    how = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    hf_config = load_hf_config(str(tmp_path / "orbax"), how)
    model = build(hf_config, dtype="float32")
    assert quantization_of_checkpoint(model.config, hf_config, tmp_path / "orbax") is None
    assert quantization_of_checkpoint(model.config, hf_config, "nowhere") is not None


def test_modules_of_sentence_transformers_come_along(demo, tmp_path):
    """So that the copy pools as the original does."""
    source = Path(shutil.copytree(demo, tmp_path / "source"))
    kinds = {
        "": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Normalize": "Normalize",
    }
    modules = [{"path": path, "type": f"models.{kind}"} for path, kind in kinds.items()]
    (source / "modules.json").write_text(json.dumps(modules))
    dense = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.Identity"}
    for path, config in (("1_Pooling", {"pooling_mode": "lasttoken"}), ("2_Dense", dense)):
        (source / path).mkdir()
        (source / path / "config.json").write_text(json.dumps(config))
    weight = {"linear.weight": np.ones((4, 8), np.float32)}
    safetensors.numpy.save_file(weight, source / "2_Dense" / "model.safetensors")
    (source / "onnx").mkdir()
    (source / "onnx" / "config.json").write_text("{}")
    target = convert(source, tmp_path / "orbax")
    read, expected = read_sentence_transformer(target), read_sentence_transformer(source)
    assert replace(read, dense=()) == replace(expected, dense=()) and read.pooling == "LAST"
    assert [each.size_out for each in read.dense] == [4]
    assert not (target / "onnx").exists()
