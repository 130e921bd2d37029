"""GPT-2: learned positions, and what its checkpoints contain."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxpage.models.registry import build
from jaxpage.research import run_with_cache
from jaxpage.rl import load_module
from jaxpage.weights.convert import convert
from jaxpage.weights.load import load
from tests import checkpoints, dense_families
from tests.models.test_families import loaded, logits, tokens
from tests.weights.test_convert import assert_bitwise


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return dense_families.build("gpt2", 0, tmp_path_factory.mktemp("gpt2"))


def rewritten(path, target, change):
    """A copy with the tensors that `change` makes of the old ones."""
    shutil.copytree(path, target)
    file = target / "model.safetensors"
    tensors = change(safetensors.numpy.load_file(file))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return target


def test_names_and_buffers_of_released_checkpoints(path, tmp_path):
    """There is no prefix, and a mask in each layer."""

    def released(tensors):
        mask = {"h.0.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32))}
        mask["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
        return mask | {name.removeprefix("transformer."): x for name, x in tensors.items()}

    old = rewritten(path, tmp_path / "old", released)
    token_ids = tokens(1, 20)
    np.testing.assert_array_equal(logits(loaded(old), token_ids), logits(loaded(path), token_ids))
    assert_bitwise(convert(old, tmp_path / "new", format="safetensors"), path)


def test_a_head_of_its_own_beside_tied_embeddings_is_refused(path, tmp_path):
    def headed(tensors):
        return tensors | {"lm_head.weight": 2 * tensors["transformer.wte.weight"]}

    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        loaded(rewritten(path, tmp_path / "new", headed))


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_transposed_weights_survive_a_conversion(variant, tmp_path):
    hf = dense_families.build("gpt2", variant, tmp_path / "hf")
    convert(convert(hf, tmp_path / "orbax"), tmp_path / "back")
    assert_bitwise(tmp_path / "back", hf)


def test_weights_that_are_not_transposed_are_refused(path, tmp_path):
    turned = rewritten(
        path,
        tmp_path / "turned",
        lambda tensors: {n: x.T if n.endswith("c_fc.weight") else x for n, x in tensors.items()},
    )
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight has shape .* wants \[256, 64\]"):
        loaded(turned)
    longer = rewritten(
        path,
        tmp_path / "longer",
        lambda tensors: {
            n: np.pad(x, ((0, 0), (0, 3))) if n.endswith("c_attn.weight") else x
            for n, x in tensors.items()
        },
    )
    with pytest.raises(ValueError, match="c_attn.weight has 195 rows .* have 192"):
        loaded(longer)


def test_texts_have_at_most_as_many_tokens_as_learned_positions(path):
    module = load_module(str(path))
    assert module.config.max_model_len == module.config.num_positions == 512
    run_with_cache(module, tokens(512), ())
    message = "513 tokens in a row, but the model has learned 512 positions"
    with pytest.raises(ValueError, match=message):
        module(jnp.asarray(tokens(2, 513)))
    with pytest.raises(ValueError, match=message):
        run_with_cache(module, tokens(513))
    with pytest.raises(ValueError, match="max_model_len=513 exceeds the 512 positions"):
        build(checkpoints.config(path), dtype="float32", max_model_len=513)


def test_positions_that_are_given(path):
    """Of padding they may be anything; a shift changes results, as transformers says."""
    import torch
    import transformers

    token_ids, positions = tokens(1, 20), np.arange(7, 27, dtype=np.int32)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given = {"input_ids": torch.tensor(token_ids), "position_ids": torch.tensor(positions)}
    with torch.no_grad():
        expected = model(**given).logits.numpy()
    ours = loaded(path)
    np.testing.assert_allclose(
        logits(ours, token_ids, jnp.asarray(positions)), expected, atol=1e-4, rtol=0
    )
    assert np.abs(logits(ours, token_ids) - expected).max() > 0.1
    wild = positions.copy()
    wild[0, -3:] = 10_000, 600, 2**31 - 1
    found = logits(ours, token_ids, jnp.asarray(wild))
    np.testing.assert_allclose(found[:, :-3], expected[:, :-3], atol=1e-4, rtol=0)
    assert np.isfinite(found).all()


def test_the_scale_of_layers(tmp_path):
    """Without it, results are others; with it they are those of transformers, see `end_to_end`."""
    path = dense_families.build("gpt2", 1, tmp_path)
    config = checkpoints.config(path)
    config.scale_attn_by_inverse_layer_idx = False
    plain = load(build(config, dtype="float32"), path, use_tqdm=False)
    token_ids = tokens(1, 20)
    assert np.abs(logits(plain, token_ids) - logits(loaded(path), token_ids)).max() > 0.1
