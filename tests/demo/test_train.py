"""Training: what is learned from, kill and resume, the gradient of the fast attention, the folder."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxpage.demo import checkpoint, evaluate, network, save, start, text, tokens, train
from jaxpage.demo.row_attention import RowAttention
from jaxpage.models.attention import DenseAttention


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model that trains in no time: one stage, one layer, no questions.

    optax relies on implicit promotion, which the test suite forbids to our own code.
    """
    monkeypatch.setattr(train, "STAGES", (tokens.Stage(0, rows=1, length=144),))
    monkeypatch.setattr(train, "WATCHED", ())
    monkeypatch.setattr(train, "report", lambda folder: None)
    for key, value in {"num_hidden_layers": 1, "intermediate_size": 32}.items():
        monkeypatch.setitem(network.HF_CONFIG, key, value)
    with jax.numpy_dtype_promotion("standard"):
        yield


def options(folder: Path) -> train.Training:
    return train.Training(
        output=folder / "model", steps=3, tokens_per_step=288, save_every=1, log_every=1
    )


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow  # compiles the step three times
def test_a_killed_run_goes_on_and_ends_with_the_same_weights(tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.main(options(whole))
    draw = tokens.training_batch

    def die_in_the_third_step(*args, step: int, **kwargs):
        if step == 2:
            raise KeyboardInterrupt
        return draw(*args, step=step, **kwargs)

    monkeypatch.setattr(tokens, "training_batch", die_in_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        train.main(options(cut))
    assert not (cut / "model").exists()
    monkeypatch.setattr(tokens, "training_batch", draw)
    train.main(options(cut))
    assert "going on after step 2" in capsys.readouterr().out
    expected, found = weights(whole), weights(cut)
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    with pytest.raises(FileExistsError, match="--output"):
        train.main(options(cut))


def test_a_run_is_not_continued_with_other_options(tmp_path):
    train.check_options(options(tmp_path))
    with pytest.raises(ValueError, match="'seed': \\(0, 1\\)"):
        train.check_options(replace(options(tmp_path), seed=1))


@pytest.mark.slow  # compiles the step
def test_steps_lower_the_loss(tokenizer):
    config = network.model_config(tokenizer.get_vocab_size())
    params = jax.tree.map(jnp.asarray, start.weights(config, tokenizer, seed=0))
    optimiser = train.optimiser_of(train.Training(steps=100), params)
    step, state, losses = (
        train.make_step(functools.partial(train.loss_of, config), optimiser),
        optimiser.init(params),
        [],
    )
    batch = tokens.training_batch(tokenizer, train.STAGES[0], tokens=288, seed=0, step=0)
    for _ in range(12):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.85 * losses[0]


def test_batches_ask_for_the_tokens_of_the_answers_and_nothing_else(tokenizer):
    rng = random.Random(0)
    people = text.people(rng, 2)
    turns = [text.look_up(rng, people), text.talk(rng)]
    said = tokens.said(text.system_message(text.table(people)), turns)
    batch = tokens.pack(tokenizer, [said, said], 160, 90)
    wanted = batch.weights > 0
    rows = batch.selected[wanted] // 160
    for row in range(2):
        ids = batch.targets[wanted][rows == row].tolist()
        expected = "".join(f"{turn.answer}<|im_end|>" for turn in turns)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    followers = batch.tokens.reshape(-1)[batch.selected[wanted] + 1]
    np.testing.assert_array_equal(followers, batch.targets[wanted])


def test_the_data_of_a_step_depends_on_seed_and_step_only(tokenizer):
    def draw(seed: int, step: int) -> np.ndarray:
        stage = tokens.Stage(0, rows=2, length=160)
        return tokens.training_batch(tokenizer, stage, tokens=320, seed=seed, step=step).tokens

    np.testing.assert_array_equal(draw(1, 5), draw(1, 5))
    assert (draw(1, 5) != draw(1, 6)).any() and (draw(1, 5) != draw(2, 5)).any()


@pytest.mark.slow  # compiles two gradients
def test_row_attention_is_dense_attention_with_its_gradient():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 9, 4, 8))
    k, v = (jax.random.normal(key, (2, 9, 2, 8)) for key in keys[1:3])
    weight = jax.random.normal(keys[3], q.shape)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))

    def total(attention, q, k, v):
        out = attention(0, q, k, v, scale=0.5, window=None, soft_cap=None)
        return jnp.sum(out * weight)

    dense, row = (
        jax.jit(jax.grad(functools.partial(total, attention), argnums=(0, 1, 2)))(q, k, v)
        for attention in (DenseAttention(positions), RowAttention())
    )
    for found, expected in zip(row, dense, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match="window 4"):
        RowAttention()(0, q, k, v, scale=1.0, window=4, soft_cap=None)


def test_a_saved_folder_is_read_back_and_measured(tmp_path, tokenizer):
    config = network.model_config(tokenizer.get_vocab_size())
    params = start.weights(config, tokenizer, seed=0)
    save.write(tmp_path / "model", params, tokenizer)
    read, bf16, again = save.read(tmp_path / "model")
    assert read.keys() == params.keys() and bf16.dtype == jnp.bfloat16
    assert again.get_vocab() == tokenizer.get_vocab()
    found = evaluate.accuracy(read, bf16, again, suites=["look-up 2"], questions=20)
    assert found == {"look-up 2": 0.0}
    with pytest.raises(FileExistsError):
        save.write(tmp_path / "model", params, tokenizer)
