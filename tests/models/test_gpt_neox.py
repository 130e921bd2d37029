"""GPT-NeoX: what checkpoints contain besides weights, their names, and options of config.json."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxpage.models.registry import build
from jaxpage.weights.convert import convert
from tests import checkpoints, dense_families
from tests.models.test_dense_families import config_of
from tests.models.test_families import loaded, logits, tokens
from tests.weights.test_convert import assert_bitwise


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return dense_families.build("gpt_neox", 0, tmp_path_factory.mktemp("gpt_neox"))


def copy_with(path, target, **tensors):
    """A copy with further tensors in its first layer's attention."""
    shutil.copytree(path, target)
    stored = safetensors.numpy.load_file(target / "model.safetensors")
    stored |= {f"gpt_neox.layers.0.attention.{name}": x for name, x in tensors.items()}
    safetensors.numpy.save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_buffers_of_released_checkpoints_are_ignored(path, tmp_path):
    """Those of Pythia have a mask, a number for masked scores, and frequencies."""
    buffers = {
        "bias": np.tril(np.ones((1, 1, 64, 64), bool)),
        "masked_bias": np.array(-1e9, np.float32),
        "rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    old = copy_with(path, tmp_path / "old", **buffers)
    token_ids = tokens(1, 20)
    np.testing.assert_array_equal(logits(loaded(old), token_ids), logits(loaded(path), token_ids))
    assert_bitwise(convert(old, tmp_path / "new", format="safetensors"), path)
    with pytest.raises(ValueError, match=r"it has .*attention\.query_bias, which the model does"):
        loaded(copy_with(path, tmp_path / "other", query_bias=np.ones(64, np.float32)))


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_rows_of_heads_survive_a_conversion(variant, tmp_path):
    """They are apart in Orbax, and there is no head where embeddings are tied."""
    hf = dense_families.build("gpt_neox", variant, tmp_path / "hf")
    convert(convert(hf, tmp_path / "orbax"), tmp_path / "back")
    assert_bitwise(tmp_path / "back", hf)


def test_options_of_old_configs(path, tmp_path):
    """Released ones have `rotary_pct` and `rotary_emb_base`."""
    old = copy_with(path, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    (old / "config.json").write_text(json.dumps(config))
    new, same = (build(checkpoints.config(each), dtype="float32") for each in (path, old))
    assert same.config == new.config and len(new.config.ropes[0].inv_freq) == 2


def test_as_many_kv_heads_as_heads():
    hf = config_of("gpt_neox")
    assert hf.num_key_value_heads == 2  # which models of this kind have not
    config = build(hf, dtype="float32").config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert len(config.ropes[0].inv_freq) == 2  # a quarter of the head
