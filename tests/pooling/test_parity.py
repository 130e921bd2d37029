"""Embeddings, classes, scores and rewards of every family against transformers' torch models, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, PoolingParams
from tests.pooling import pooling_checkpoints
from tests.pooling.pooling_checkpoints import (
    CASES,
    OPTIONS,
    build,
    hidden_states,
    logits,
    normalised,
    texts,
    write_json,
    write_modules,
)
from tests.quantized_checkpoints import FORMATS, write, write_float

DECODERS = ("Qwen2", "Qwen3", "Llama", "GPTNeoX", "GPT2", "Phi")  # causal in all variants
RAW = PoolingParams(use_activation=False)
# The classes of a decoder do not depend on what its other variants vary.
WITH_CLASSES = [
    (family, variant)
    for family, variant in CASES
    if variant == 0
    or family not in (*DECODERS, "Gemma3Text")
    or (family, variant) == ("Gemma3Text", 2)  # causal, unlike variant 0
]


def make(folder: Path, **options) -> LLM:
    # All texts of a test fit into one launch, so one program computes them.
    own = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    return LLM(str(folder), **(OPTIONS | own | options))


def slow_except(fast: tuple[str, int], cases: list[tuple[str, int]]) -> list:
    return [case if case == fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def embeddings(llm: LLM, prompts, **options) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False, **options)])


@pytest.mark.parametrize(("family", "variant"), slow_except(("Bert", 0), CASES))
def test_embeddings(family, variant, tmp_path):
    build(family, variant, tmp_path)
    prompts = texts()
    llm = make(tmp_path)
    states = hidden_states(tmp_path, prompts)
    is_decoder = family in DECODERS or (family, variant) == ("Gemma3Text", 2)
    if family == "Gemma3Text" and not is_decoder:
        expected = [s.mean(axis=0) for s in states]
    else:
        expected = [s[-1 if is_decoder else 0] for s in states]
    got = embeddings(llm, prompts)
    np.testing.assert_allclose(got, [normalised(x) for x in expected], atol=1e-5, rtol=0)
    tokens = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for output, state in zip(tokens, states, strict=True):
        np.testing.assert_allclose(output.outputs.data, normalised(state), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "variant"), slow_except(("Qwen3", 0), WITH_CLASSES))
def test_classes(family, variant, tmp_path):
    head = "ForSequenceClassification"
    build(family, variant, tmp_path, head=head, num_labels=3)
    prompts = texts()
    llm = make(tmp_path)
    expected = logits(tmp_path, prompts, head=head)
    raw = llm.encode(prompts, RAW, pooling_task="classify", use_tqdm=False)
    scale = np.abs(expected).max()
    np.testing.assert_allclose([o.outputs.data for o in raw], expected, atol=1e-5 * scale, rtol=0)
    probs = [o.outputs.probs for o in llm.classify(prompts, use_tqdm=False)]
    powers = np.exp(np.array(expected))
    np.testing.assert_allclose(
        probs, powers / powers.sum(axis=-1, keepdims=True), atol=1e-5 * scale, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Qwen2", "GPT2"])
def test_classes_of_tokens(family, tmp_path):
    head = "ForTokenClassification"
    build(family, 0, tmp_path, head=head, num_labels=4)
    prompts = texts(3)
    llm = make(tmp_path)
    expected = logits(tmp_path, prompts, head=head)
    for output, wanted in zip(llm.encode(prompts, RAW, use_tqdm=False), expected, strict=True):
        np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5, rtol=0)


@pytest.mark.slow
def test_tensors_that_compute_nothing_are_ignored(tmp_path):
    """Released checkpoints of GPT-NeoX have masks."""
    build("GPTNeoX", 0, tmp_path)
    file = tmp_path / "model.safetensors"
    prompts = texts(3)
    expected = embeddings(make(tmp_path), prompts)
    save_file(load_file(file) | {"layers.0.attention.bias": np.ones((1, 1, 8, 8), bool)}, file)
    np.testing.assert_array_equal(embeddings(make(tmp_path), prompts), expected)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_a_folder_of_sentence_transformers_says_how_to_pool(pooling, tmp_path):
    build("Bert", 1, tmp_path)
    write_modules(tmp_path, pooling=pooling, normalize=False)
    prompts = texts()
    states = hidden_states(tmp_path, prompts)
    of = {"cls": lambda s: s[0], "mean": lambda s: s.mean(axis=0), "last": lambda s: s[-1]}
    got = embeddings(make(tmp_path), prompts)
    np.testing.assert_allclose(got, [of[pooling](s) for s in states], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_long_texts_are_attended_in_parts(tmp_path, monkeypatch):
    """Scores of a row do not fit in memory at once."""
    from jaxpage.models import token_batch

    monkeypatch.setattr(token_batch, "_MAX_SCORES", 4 * 128 * 16)
    for family in ("ModernBert", "Qwen3"):
        folder = tmp_path / family
        build(family, 0, folder)
        prompts = texts(4, longest=120)
        states = hidden_states(folder, prompts)
        expected = [normalised(s[-1 if family == "Qwen3" else 0]) for s in states]
        np.testing.assert_allclose(embeddings(make(folder), prompts), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_embedding_gemma(tmp_path):
    """Bidirectional attention, the mean, two Dense modules, unit length."""
    build("Gemma3Text", 0, tmp_path)
    write_modules(tmp_path)
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3_Dense", "Dense"),
    ]
    modules.append(("4_Normalize", "Normalize"))
    write_json(
        tmp_path / "modules.json",
        [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules],
    )
    rng, weights, size = np.random.default_rng(0), [], 32
    for folder, out in (("2_Dense", 64), ("3_Dense", 24)):
        config = {"in_features": size, "out_features": out, "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        write_json(tmp_path / folder / "config.json", config)
        weights.append(rng.standard_normal((out, size), np.float32))
        save_file({"linear.weight": weights[-1]}, tmp_path / folder / "model.safetensors")
        size = out
    prompts = texts()
    means = np.array([s.mean(axis=0) for s in hidden_states(tmp_path, prompts)])
    expected = normalised(means @ weights[0].T @ weights[1].T)
    llm = make(tmp_path, hf_overrides={"matryoshka_dimensions": [8, 24]})
    np.testing.assert_allclose(embeddings(llm, prompts), expected, atol=1e-5, rtol=0)
    short = embeddings(llm, prompts, pooling_params=PoolingParams(dimensions=8))
    np.testing.assert_allclose(short, normalised(expected[:, :8]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_qwen3_embedding_is_a_causal_checkpoint_with_modules(tmp_path):
    """Qwen3-Embedding: the architecture generates, the folder pools the last token, names lack "model."."""
    build("Qwen3", 1, tmp_path, head="ForCausalLM")
    write_modules(tmp_path, pooling="last")
    file = tmp_path / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(file).items()}, file)
    prompts = texts()
    expected = [normalised(s[-1]) for s in hidden_states(tmp_path, prompts)]
    np.testing.assert_allclose(embeddings(make(tmp_path), prompts), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied", "with a quantised head"])
def test_qwen3_reranker_scores_by_two_tokens(kind, tmp_path):
    """Its score is the softmax of "yes" over "no" and "yes" as the next token."""
    source = path = floats = tmp_path / "source"
    build("Qwen3", 0, source, head="ForCausalLM", tie_word_embeddings=kind == "tied")
    pooling_checkpoints.write_tokenizer(source)
    if kind == "with a quantised head":
        path, floats = tmp_path / "quantised", tmp_path / "floats"
        write_float(source, floats, write(source, path, FORMATS["ct-fp8-dynamic"], ignore=()))
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["w17", "w200"],
        "is_original_qwen3_reranker": True,
    }
    llm = make(path, hf_overrides=overrides, skip_tokenizer_init=False)
    queries, documents = ["w9 w8", "w7 w6"], [" w30 w31", " w99"]
    outputs = llm.score(queries, documents, use_tqdm=False)
    for output, query, document in zip(outputs, queries, documents, strict=True):
        ids = llm.get_tokenizer()(query + document)["input_ids"]
        assert output.prompt_token_ids == ids
        (all_logits,) = logits(floats, [ids], head="ForCausalLM")
        no, yes = all_logits[-1][[17, 200]]
        assert output.outputs.score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)


@pytest.mark.slow
def test_a_cross_encoder_gets_pairs_with_their_types(tmp_path):
    import torch

    head = "ForSequenceClassification"
    build("Bert", 0, tmp_path, head=head, num_labels=1)
    pooling_checkpoints.write_tokenizer(tmp_path)
    llm = make(tmp_path, skip_tokenizer_init=False)
    documents = ["w10 w11 w12", "w20"]
    outputs = llm.score("w8 w9", documents, use_tqdm=False)
    for output, document in zip(outputs, documents, strict=True):
        pair = llm.get_tokenizer()("w8 w9", document)
        assert 1 in pair["token_type_ids"]
        types = torch.tensor([pair["token_type_ids"]])
        ((logit,),) = logits(tmp_path, [pair["input_ids"]], head=head, token_type_ids=types)
        assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


@pytest.mark.slow
def test_rewards_of_tokens_and_of_steps(tmp_path):
    """Qwen2's reward models: two layers behind the hidden states; a process reward is read at a tag."""
    build("Qwen2", 0, tmp_path)
    rng = np.random.default_rng(1)
    file = tmp_path / "model.safetensors"
    stored = {f"model.{k.removeprefix('model.')}": v for k, v in load_file(file).items()}
    head = {
        "score.0.weight": (32, 32),
        "score.0.bias": (32,),
        "score.2.weight": (2, 32),
        "score.2.bias": (2,),
    }
    head = {name: rng.standard_normal(size).astype(np.float32) for name, size in head.items()}
    prompts = texts(3)
    states = hidden_states(tmp_path, prompts)

    def raw(state: np.ndarray) -> np.ndarray:
        inner = np.maximum(state @ head["score.0.weight"].T + head["score.0.bias"], 0)
        return inner @ head["score.2.weight"].T + head["score.2.bias"]

    save_file(stored | head, file)
    overrides = {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2}
    llm = make(tmp_path, hf_overrides=overrides)
    for output, state in zip(llm.reward(prompts, use_tqdm=False), states, strict=True):
        powers = np.exp(raw(state) - raw(state).max(axis=-1, keepdims=True))
        wanted = powers / powers.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5, rtol=0)
    tag = prompts[2][10]
    params = PoolingParams(step_tag_id=tag, returned_token_ids=[1], use_activation=False)
    (output,) = llm.reward([prompts[2]], pooling_params=params, use_tqdm=False)
    where = [i for i, token in enumerate(prompts[2]) if token == tag]
    np.testing.assert_allclose(
        output.outputs.data, raw(states[2])[where][:, [1]], atol=1e-4, rtol=0
    )
    one = {name: value[:1] if name.startswith("score.2") else value for name, value in head.items()}
    save_file(stored | one, file)
    llm = make(tmp_path, hf_overrides={"architectures": ["Qwen2ForRewardModel"]})
    (output,) = llm.reward([prompts[0]], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data, raw(states[0])[:, :1], atol=1e-4, rtol=0)
