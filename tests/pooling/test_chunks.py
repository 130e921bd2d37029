"""Texts of causal models that are longer than a launch: the same numbers as at once, chunk by chunk, in flat memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM, PoolingParams
from jaxpage.device import Device
from jaxpage.pooling.chunks import Chunk, ChunkSize, cut, make_chunks
from tests.pooling.pooling_checkpoints import (
    OPTIONS,
    build,
    hidden_states,
    logits,
    normalised,
    texts,
)

DECODERS = [
    ("Qwen3", 0),
    pytest.param("Qwen2", 1, marks=pytest.mark.deep),
    pytest.param("Llama", 2, marks=pytest.mark.deep),
    ("Gemma3Text", 2),  # with windows
]


def make(folder: Path, tokens: int, **options) -> LLM:
    """An engine whose launches have `tokens` tokens of a text."""
    fixed = {"skip_tokenizer_init": True, "max_num_batched_tokens": tokens}
    return LLM(str(folder), **(OPTIONS | fixed | options))


def mixed() -> list[list[int]]:
    """Texts of one to three chunks of 64 tokens, among them the borders, beside short ones."""
    prompts = texts(9, longest=160, seed=3)
    return [*prompts, prompts[-1][:64], prompts[-1][:65], prompts[-1][:128], prompts[-1][:129]]


def embeddings(llm: LLM, prompts) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])


def called(llm: LLM) -> list[str]:
    return [program.name for program in llm.programs() if program.num_calls]


def test_embeddings_in_chunks_are_those_of_transformers(tmp_path):
    build("Qwen3", 0, tmp_path)
    prompts = mixed()
    wanted = [normalised(states[-1]) for states in hidden_states(tmp_path, prompts)]
    found = embeddings(make(tmp_path, 64), prompts)
    np.testing.assert_allclose(found, np.array(wanted), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant"), DECODERS)
def test_embeddings_do_not_depend_on_the_chunks(family, variant, tmp_path):
    """Two to four chunks of 24 tokens, among them the borders, beside short texts; in any company."""
    build(family, variant, tmp_path, max_position_embeddings=96)
    prompts = texts(9, longest=96, seed=3)
    prompts += [prompts[-1][:n] for n in (24, 25, 48, 49)]
    states = hidden_states(tmp_path, prompts)
    raw = PoolingParams(use_activation=False)
    whole = make(tmp_path, 256).encode(prompts, raw, pooling_task="token_embed", use_tqdm=False)
    llm = make(tmp_path, 24, pooler_config={"pooling_type": "MEAN"})
    found = embeddings(llm, prompts)
    assert any(" C=24 " in name for name in called(llm)), called(llm)
    for atol, expected in ((1e-5, states), (1e-6, [output.outputs.data for output in whole])):
        means = np.array([normalised(np.mean(x, axis=0)) for x in expected])
        np.testing.assert_allclose(found, means, atol=atol, rtol=0)
    # Neighbours and what was computed before leave no trace in a KV pool.
    alone = np.array([embeddings(llm, [prompt])[0] for prompt in prompts[-3:]])
    np.testing.assert_allclose(alone, found[-3:], atol=1e-6, rtol=0)
    tokens_of = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for output, all_at_once, state in zip(tokens_of, whole, states, strict=True):
        got, last = output.outputs.data, all_at_once.outputs.data[-1]
        np.testing.assert_allclose(got, normalised(state), atol=1e-5, rtol=0)
        np.testing.assert_allclose(got[-1], normalised(last), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_classes_of_long_texts(head, tmp_path):
    build("Qwen2", 0, tmp_path, head=head, num_labels=3)
    prompts = mixed()
    expected = logits(tmp_path, prompts, head=head)
    raw = PoolingParams(use_activation=False)
    for output, wanted in zip(
        make(tmp_path, 64).encode(prompts, raw, use_tqdm=False), expected, strict=True
    ):
        atol = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(output.outputs.data, wanted, atol=atol, rtol=0)


@pytest.mark.slow
def test_memory_is_that_of_a_chunk(tmp_path, production_compiler):
    """A text 16 times as long has 16 times the KV, in place, and no more of anything else."""
    build("Qwen3", 0, tmp_path, max_position_embeddings=2048)
    llm = make(tmp_path, 64)
    short, long = texts(1, longest=1)[0] * 100, texts(2, longest=2048)[1]
    for prompt in (short, long):
        embeddings(llm, [prompt])
    programs = {p.name: p for p in llm.programs() if p.num_calls}
    assert set(programs) == {"texts C=64 L=128", "texts C=64 L=2048"}
    of_token = 2 * 2 * 2 * 8 * 4  # K and V of two layers and two heads
    for length in (128, 2048):
        program = programs[f"texts C=64 L={length}"]
        assert program.executable is not None
        analysis: Any = program.executable.memory_analysis()
        assert analysis.alias_size_in_bytes >= length * of_token
    few, many = (programs[f"texts C=64 L={length}"].temp_bytes for length in (128, 2048))
    assert many <= few + 2048 * of_token // 8
    held = sum(x.nbytes for x in jax.live_arrays())
    for _ in range(3):
        embeddings(llm, [long, short, long])
    assert sum(x.nbytes for x in jax.live_arrays()) <= held, "the KV of a text is kept"


def test_bidirectional_models_see_all_tokens_at_once(tmp_path):
    build("Gemma3Text", 0, tmp_path)
    llm = make(tmp_path, 64)
    prompts = texts(3, longest=150)
    means = [normalised(s.mean(axis=0)) for s in hidden_states(tmp_path, prompts)]
    np.testing.assert_allclose(embeddings(llm, prompts), means, atol=1e-5, rtol=0)
    assert not any(" C=" in program.name for program in llm.programs())


def test_chunks_cover_a_text():
    size = ChunkSize(longest=160, num_tokens=64)
    assert list(cut(129, size)) == [Chunk(0, 64, 129), Chunk(64, 128, 129), Chunk(128, 129, 129)]
    assert [chunk.is_last for chunk in cut(129, size)] == [False, False, True]


def test_pools_double_up_to_the_longest_text(tmp_path):
    build("Qwen3", 0, tmp_path)
    engine: Any = make(tmp_path, 64)._engine
    model, cpu = engine.model, Device(platform="cpu")
    chunks = make_chunks(model, cpu, num_tokens=64, max_len=600, block_size=16)
    assert [size.longest for size in chunks.sizes] == [128, 256, 512, 600]
    assert [chunks.pool_of(size).num_blocks for size in chunks.sizes] == [9, 17, 33, 39]
    assert chunks.size_of(256).longest == 256 and chunks.size_of(257).longest == 512
    assert not make_chunks(model, cpu, num_tokens=64, max_len=64, block_size=16).sizes
