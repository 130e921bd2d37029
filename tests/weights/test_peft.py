"""PEFT folders: what is read of them, and what is refused and how."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage.weights.peft import AdaptedLayers, read_adapter
from jaxpage.weights.peft_config import read_peft_config
from tests import adapters

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
DOWN0, DOWN1 = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q0: (6, 5), Q1: (6, 5), DOWN0: (5, 9), DOWN1: (5, 9)}
LAYERS = AdaptedLayers(shapes=SHAPES)
PREFIX = "base_model.model."


def halves(names=(Q0, Q1), rank=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    tensors = {}
    for name in names:
        num_out, num_in = SHAPES[name]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = rng.normal(size=(rank, num_in)).astype(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = rng.normal(size=(num_out, rank)).astype(dtype)
    return tensors


def folder(path, tensors=None, **fields):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    adapters.write(path / "adapter", config | fields, halves() if tensors is None else tensors)
    return path / "adapter"


def read(path, max_rank=16):
    return read_adapter(path, LAYERS, max_rank=max_rank)


def test_halves_are_read_and_scaled(tmp_path):
    tensors = halves()
    found = read(folder(tmp_path, tensors))
    assert sorted(found) == [Q0, Q1]
    for name, half in found.items():
        np.testing.assert_array_equal(half.a, tensors[f"{PREFIX}{name}.lora_A.weight"])
        expected = np.float32(3.0) * tensors[f"{PREFIX}{name}.lora_B.weight"]
        np.testing.assert_array_equal(half.b, expected)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"lora_alpha": 1.5}, 0.75),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 4}}, 2.0),
        ({"alpha_pattern": {".*0.*q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"0.self": 10}}, 3.0),  # a pattern goes to the end of the name
    ],
)
def test_scales(tmp_path, fields, scale):
    tensors = halves()
    found = read(folder(tmp_path, tensors, **fields))
    expected = np.float32(scale) * tensors[f"{PREFIX}{Q0}.lora_B.weight"]
    np.testing.assert_array_equal(found[Q0].b, expected)


def test_rank_pattern(tmp_path):
    tensors = halves((Q0,)) | halves((Q1,), rank=3)
    path = folder(tmp_path, tensors, rank_pattern={"1.self_attn.q_proj": 3})
    found = read(path)
    assert found[Q0].a.shape == (2, 5) and found[Q1].b.shape == (6, 3)
    np.testing.assert_array_equal(found[Q1].b, 2 * tensors[f"{PREFIX}{Q1}.lora_B.weight"])
    with pytest.raises(ValueError, match="rank 3 of .*layers.1.* exceeds max_lora_rank=2"):
        read(path, max_rank=2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_read(tmp_path, dtype):
    wide = halves()
    path = folder(tmp_path)
    narrow = {name: x.astype(dtype) for name, x in wide.items()}
    write_raw(path / "adapter_model.safetensors", narrow)
    found = read(path)
    a = narrow[f"{PREFIX}{Q0}.lora_A.weight"].astype(np.float32)
    np.testing.assert_array_equal(found[Q0].a, a)


def write_raw(file, tensors):
    """safetensors' own NumPy side has bfloat16 in recent versions only."""
    names = {np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
    header, data = {}, b""
    for name, x in tensors.items():
        end = len(data) + x.nbytes
        header[name] = {
            "dtype": names[x.dtype],
            "shape": x.shape,
            "data_offsets": [len(data), end],
        }
        data += x.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"target_modules": r".*\.q_proj"}, (Q0, Q1)),
        ({"target_modules": r"model\.layers\.1\..*_proj"}, (Q1, DOWN1)),
        ({"target_modules": "all-linear"}, (Q0, Q1, DOWN0, DOWN1)),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1}, (Q1, DOWN1)),
        ({"target_modules": ["mlp.down_proj"], "layers_to_transform": [0, 7]}, (DOWN0,)),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, (Q1,)),
        ({"target_modules": [Q0, "down_proj"], "exclude_modules": ["down_proj"]}, (Q0,)),
        ({"exclude_modules": r".*layers\.0.*"}, (Q1,)),
    ],
)
def test_targets(tmp_path, fields, names):
    """What a config targets must be there, all of it and nothing else."""
    tensors = halves(names)
    assert sorted(read(folder(tmp_path, tensors, **fields))) == sorted(names)
    if len(names) > 1:
        fewer = {n: x for n, x in tensors.items() if names[-1] not in n}
        with pytest.raises(ValueError, match=f"lacks the tensors of 1 layers .*{names[-1]}"):
            read(folder(tmp_path, fewer, **fields))
    if other := set(SHAPES) - set(names):
        with pytest.raises(ValueError, match="target_modules of .* does not name its layer"):
            read(folder(tmp_path, tensors | halves(other), **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only \"LORA\""),
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*lm_head"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'.*own weights"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head'"),
        ({"target_modules": ["model.embed_tokens"]}, "target_modules has 'model.embed_tokens'"),
        ({"target_modules": []}, "target_modules names no layer"),
        ({"target_modules": 3}, "target_modules must be a string or a list"),
        ({"target_modules": "(q_proj"}, "target_modules: a regular expression cannot be read"),
        (
            {"exclude_modules": ".*q_proj", "target_modules": "("},
            r"target_modules: a regular expression cannot be read: '\('",
        ),
        ({"exclude_modules": "["}, r"exclude_modules: a regular expression cannot be read: '\['"),
        (
            {"rank_pattern": {"q_proj": 4, "(": 8}},
            r"rank_pattern: a regular expression cannot be read: '\('",
        ),
        ({"alpha_pattern": {"q_proj": 4, "[": 8}}, "alpha_pattern: a regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern: .*: global flags not at the start"),
        ({"rank_pattern": {"a{99999999999}": 4}}, "rank_pattern: .*repetition number is too large"),
        (
            {"layers_to_transform": 1, "layers_pattern": ["layers", "("]},
            "layers_pattern: a regular",
        ),
        ({"r": 0}, "r must be a positive int, got 0"),
        ({"r": "8"}, "r must be a positive int, got '8'"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern\['q_proj'\] must be a positive int"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be an object"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform must be"),
        (
            {"r": 17},
            "rank 17 of .* exceeds max_lora_rank=16; start the engine with max_lora_rank=17",
        ),
        ({"r": 3}, r"lora_A.weight has shape \(2, 5\); the model and .* say \(3, 5\)"),
    ],
)
def test_refused_configs(tmp_path, fields, message):
    path = folder(tmp_path, **fields)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "adapter_config.json" in str(error.value)


def with_change(change):
    tensors = halves()
    change(tensors)
    return tensors


A0, B0 = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no tensors"),
        (with_change(lambda t: t.pop(B0)), "lacks the other half, .*q_proj.lora_B.weight"),
        (with_change(lambda t: t.pop(A0)), "lacks the other half, .*q_proj.lora_A.weight"),
        (
            with_change(lambda t: t.update({B0: t[B0][:5]})),
            r"q_proj.lora_B.weight has shape \(5, 2\).* say \(6, 2\)",
        ),
        (
            with_change(lambda t: t.update({A0: t[A0].T.copy()})),
            r"lora_A.weight has shape \(5, 2\).* say \(2, 5\)",
        ),
        (
            with_change(lambda t: t.update({A0.replace("q_proj", "z_proj"): t[A0]})),
            "z_proj.* is of no layer that can be adapted here; there are .* or merge the adapter",
        ),
        (
            with_change(lambda t: t.update({f"{PREFIX}lm_head.lora_A.weight": t[A0]})),
            "changes the embedding or the head",
        ),
        (
            with_change(
                lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": t[A0]})
            ),
            "changes the embedding or the head",
        ),
        (
            with_change(lambda t: t.update({f"{PREFIX}{Q0}.lora_magnitude_vector": t[A0][0]})),
            "belongs to DoRA",
        ),
        (with_change(lambda t: t.update({"something": t[A0]})), "something is not the half"),
        (
            with_change(lambda t: t.update({A0: t[A0].astype(np.int32)})),
            "has dtype int32; adapters are stored as floats",
        ),
        (
            with_change(lambda t: t.update({A0: np.full_like(t[A0], np.nan)})),
            "has values that are not finite",
        ),
    ],
)
def test_refused_tensors(tmp_path, tensors, message):
    path = folder(tmp_path, tensors)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "adapter_model.safetensors" in str(error.value)


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match="is not a folder with adapter_config.json"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        read(tmp_path)
    path = folder(tmp_path)
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="adapter_model.safetensors .*truncated"):
            read(path)
    file.unlink()
    with pytest.raises(ValueError, match="has adapter_config.json and no adapter_model"):
        read(path)
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match="adapter_model.bin .* never loaded"):
        read(path)
    for text in ("{", "[]", '{"peft_type": "LORA", "target_modules": {}}', "\xff"):
        (path / "adapter_config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="adapter_config.json"):
            read(path)


def test_names_of_the_file_are_translated(tmp_path):
    tensors = {n.replace("model.layers", "language.layers"): x for n, x in halves().items()}
    path = folder(tmp_path, tensors)
    layers = AdaptedLayers(
        shapes=SHAPES,
        rename=lambda n: n.replace("language.", "model.") if "language." in n else None,
    )
    assert sorted(read_adapter(path, layers, max_rank=2)) == [Q0, Q1]
    save_file(
        load_file(path / "adapter_model.safetensors") | halves((DOWN0,)),
        path / "adapter_model.safetensors",
    )
    with pytest.raises(ValueError, match="of no layer that can be adapted here"):
        read_adapter(path, layers, max_rank=2)


def test_nested_numbers_do_not_count_as_layers(tmp_path):
    path = folder(tmp_path, layers_to_transform=[1], target_modules=["w1"])
    config = read_peft_config(path)
    assert config.targets("model.layers.1.mlp.experts.0.w1")
    assert not config.targets("model.layers.0.mlp.experts.1.w1")


@pytest.mark.parametrize(("pattern", "finds"), [("(layers)", True), ("model|layers", False)])
def test_layers_pattern_may_have_groups_and_alternatives(tmp_path, pattern, finds):
    """As in PEFT, an alternative that matches without a number selects no layer."""
    config = read_peft_config(folder(tmp_path, layers_to_transform=[1], layers_pattern=pattern))
    assert config.targets(Q1) == finds
    assert not config.targets(Q0)
