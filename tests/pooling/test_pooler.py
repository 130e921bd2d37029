"""From raw numbers to answers: activations, sizes, cosines; and what is refused before anything is computed."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpage import PoolerConfig, PoolingParams
from jaxpage.pooling.inputs import PoolingInputs
from jaxpage.pooling.params import to_pooler_config
from jaxpage.pooling.pooler import ModelInfo, Pooler, sigmoid, softmax
from jaxpage.pooling.sentence_transformers import SentenceTransformer
from jaxpage.tokenizer import load_tokenizer
from tests.pooling.pooling_checkpoints import write_tokenizer

INFO = ModelInfo(
    name="BertModel",
    tasks=("embed", "token_embed"),
    size=4,
    pooler=PoolerConfig(),
    normalizes=True,
    activation=softmax,
    matryoshka=(2, 4),
)
CLASSES = dataclasses.replace(INFO, tasks=("classify", "token_classify"), size=3)
CROSS = dataclasses.replace(INFO, tasks=("classify",), size=1, activation=sigmoid)
RAW = np.array([3.0, 4.0, 0.0, 12.0], np.float32)


def pooler(info: ModelInfo = INFO, tokenizer=None) -> Pooler:
    config = SimpleNamespace(max_model_len=8, chat_template=None)
    folder = SentenceTransformer()
    inputs = PoolingInputs(tokenizer, config, folder, vocab_size=100, joins_pairs=True)
    return Pooler(inputs, info)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


def test_embeddings_have_unit_length_unless_they_are_raw():
    work = pooler().embed([[1, 2], [3]], PoolingParams())
    first, second = work.finish([RAW, 2 * RAW])
    np.testing.assert_allclose(first.outputs.embedding, RAW / 13, rtol=1e-6)
    assert first.outputs.embedding == second.outputs.embedding and first.outputs.hidden_size == 4
    assert (first.prompt_token_ids, second.request_id, first.finished) == ([1, 2], "1", True)
    (raw,) = pooler().embed([1], PoolingParams(use_activation=False)).finish([RAW])
    assert raw.outputs.embedding == RAW.tolist()
    off = dataclasses.replace(INFO, pooler=PoolerConfig(normalize=False))
    (raw,) = pooler(off).embed([1]).finish([RAW])
    assert raw.outputs.embedding == RAW.tolist()


def test_shorter_embeddings_have_unit_length_too():
    (output,) = pooler().embed([1], PoolingParams(dimensions=2)).finish([RAW])
    np.testing.assert_allclose(output.outputs.embedding, [0.6, 0.8], rtol=1e-6)


def test_classes_are_probabilities_of_a_softmax():
    (output,) = pooler(CLASSES).classify([1]).finish([np.log(np.array([1, 2, 5], np.float32))])
    np.testing.assert_allclose(output.outputs.probs, [0.125, 0.25, 0.625], rtol=1e-6)
    assert output.outputs.num_classes == 3


def test_sigmoids_do_not_overflow():
    assert sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0.0, 0.5, 1.0]


def test_scores_of_embeddings_are_cosines_of_one_with_many():
    work = pooler().score([1, 2], [[3], [4]])
    assert [list(t.token_ids) for t in work.texts] == [[1, 2], [3], [4]]
    same, other = work.finish([RAW, RAW * 7, np.array([-4.0, 3.0, 0.0, 0.0], np.float32)])
    assert same.outputs.score == pytest.approx(1.0) and other.outputs.score == pytest.approx(
        0, abs=1e-6
    )
    assert same.request_id == "0_1" and other.prompt_token_ids == [1, 2, 4]


def test_a_reward_is_read_at_the_tag_of_a_step():
    params = PoolingParams(step_tag_id=7, use_activation=False)
    (output,) = pooler(CLASSES).encode([7, 1, 7], params, "token_classify").finish([np.eye(3)])
    assert output.outputs.data.tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda p: p.embed([[]]), "empty"),
        (lambda p: p.embed([100]), "has 100, the vocabulary has ids 0..99"),
        (lambda p: p.embed([1] * 9), "length is 8 tokens. However, your prompt contains 9 input"),
        (
            lambda p: p.embed([[1], [1] * 9]),
            "prompt 1 of 2: This model's maximum context length is 8",
        ),
        (lambda p: p.embed("text"), "need a tokenizer"),
        (
            lambda p: p.embed([1], PoolingParams(dimensions=3)),
            "not supported by the model; it has 2, 4",
        ),
        (
            lambda p: p.embed([1], PoolingParams(task="classify")),
            "is 'classify', but the call's task is 'embed'",
        ),
        (lambda p: p.embed([[1], [2]], [PoolingParams()] * 3), "3 entries for 2 prompts"),
        (lambda p: p.embed([1], 3), "must be PoolingParams"),
        (lambda p: p.embed([1], prompt_name="query"), "the model has no prompt 'query'"),
        (
            lambda p: p.classify([1]),
            "BertModel cannot classify: its tasks are embed and token_embed",
        ),
        (lambda p: p.reward([1]), "cannot reward"),
        (lambda p: p.encode([1], None, "classify"), "BertModel does not have the task 'classify'"),
        (lambda p: p.encode([1], None, "score"), "call LLM.score"),
        (lambda p: p.score([[1], [2]], [[1]]), "data_1 has 2 texts and data_2 1"),
        (
            lambda p: p.embed([1], tokenization_kwargs={"truncate_prompt_tokens": 9}),
            "more than max_model_len=8",
        ),
        (
            lambda p: p.embed([1] * 9, tokenization_kwargs={"max_length": 3}),  # truncates nothing
            "your prompt contains 9 input tokens",
        ),
        (lambda p: p.embed({"prompt_embeds": np.ones((1, 2))}), "prompt_embeds"),
        (
            lambda p: p.embed({"prompt_token_ids": [1], "multi_modal_data": {"image": "x"}}),
            '"multi_modal_data" is not for this model, which takes text only',
        ),
        (
            lambda p: p.score([1], [[2], {"prompt_token_ids": [1], "multi_modal_data": {"a": 1}}]),
            'prompt 2 of 3: "multi_modal_data" is not for this model',
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(ask, complaint):
    with pytest.raises(ValueError, match=complaint):
        ask(pooler())


def test_a_cross_encoder_has_one_class_and_takes_texts():
    with pytest.raises(ValueError, match="has 3 classes"):
        pooler(CLASSES).score("a", "b")
    with pytest.raises(ValueError, match="data_2 must be texts"):
        pooler(dataclasses.replace(CLASSES, size=1)).score("a", [1, 2])
    with pytest.raises(ValueError, match="dimensions are for embeddings"):
        pooler(CLASSES).classify([1], PoolingParams(dimensions=2))


@pytest.mark.parametrize("info", [INFO, CROSS], ids=["embedder", "cross-encoder"])
@pytest.mark.parametrize(
    ("texts", "options", "complaint"),
    [
        (("w7 \ud800", "w8"), {}, "has a lone surrogate, '\\\\ud800', at position 3"),
        (("w7", "\ud800"), {}, "has a lone surrogate, '\\\\ud800', at position 0"),
        (
            ("w7", "w8"),
            {"tokenization_kwargs": {"x": 1}},
            "tokenization_kwargs has x; supported are",
        ),
        (
            ("w7", "w8"),
            {"tokenization_kwargs": {"return_tensors": "np"}},
            "tokenization_kwargs has return_tensors; supported are",
        ),
        (
            ("w7", "w8"),
            {"tokenization_kwargs": {"truncation": True, "max_length": 0}},
            "max_length of tokenization_kwargs must be an int of at least 1, got 0",
        ),
        (("w7", "w8"), {"params": 3}, "pooling_params must be PoolingParams or a list"),
        (("w7", "w8"), {"params": [3]}, "pooling_params must be PoolingParams or a list"),
        (("w7", "w8"), {"params": [PoolingParams()] * 3}, "pooling_params has 3 entries for"),
        (
            ("w7", ["w8", "w9"]),
            {"params": [PoolingParams(truncate_prompt_tokens=n) for n in (4, 5)]},
            "truncate_prompt_tokens must be the same",
        ),
    ],
)
def test_texts_to_score_are_checked_alike_for_both_kinds_of_models(
    info, texts, options, complaint, tokenizer
):
    with pytest.raises(ValueError, match=complaint):
        pooler(info, tokenizer).score(*texts, **options)


def test_a_cross_encoder_takes_a_list_of_params_as_an_embedder_does(tokenizer):
    for info in (INFO, CROSS):
        params = [PoolingParams(truncate_prompt_tokens=4)]
        work = pooler(info, tokenizer).score("w7", ["w8 w9 w8 w9"] * 2, params)
        assert {len(text.token_ids) for text in work.texts} <= {3, 4}
    each = [PoolingParams(use_activation=False), PoolingParams()]
    work = pooler(CROSS, tokenizer).score("w7", ["w8", "w9"], each)
    raw, activated = work.finish([np.zeros(1, np.float32)] * 2)
    assert (raw.outputs.score, activated.outputs.score) == (0.0, 0.5)


def test_ids_are_cut_to_the_length_that_is_asked_for():
    for length, left in ((3, 3), (-1, 8)):
        params = PoolingParams(truncate_prompt_tokens=length)
        work = pooler().embed([list(range(20))], params)
        assert list(work.texts[0].token_ids) == list(range(left))


@pytest.mark.parametrize(
    "text", ["w7 w8 w9 w8 w7 w6", [2, 7, 8, 9, 8, 7, 6, 3]], ids=["text", "ids"]
)
@pytest.mark.parametrize(
    ("side", "of_text", "of_ids"),
    [
        (None, [2, 7, 8, 3], [2, 7, 8, 9]),
        ("right", [2, 7, 8, 3], [2, 7, 8, 9]),
        ("left", [2, 7, 6, 3], [8, 7, 6, 3]),
    ],
)
def test_a_text_loses_the_side_that_is_named_between_its_special_tokens(
    tokenizer, text, side, of_text, of_ids
):
    usual = tokenizer.truncation_side
    cut = {"truncate_prompt_tokens": 4, "truncation_side": side}
    work = pooler(INFO, tokenizer).embed([text], tokenization_kwargs=cut)
    kept = of_text if isinstance(text, str) else of_ids
    assert list(work.texts[0].token_ids) == kept
    assert tokenizer.truncation_side == usual


def test_the_longer_text_of_a_pair_loses_the_side_that_is_named(tokenizer):
    for side, kept in (("right", [8, 9]), ("left", [9, 6])):
        cut = {"truncate_prompt_tokens": 6, "truncation_side": side}
        work = pooler(CROSS, tokenizer).score("w7", "w8 w9 w8 w9 w6", tokenization_kwargs=cut)
        assert list(work.texts[0].token_ids) == [2, 7, 3, *kept, 3]


def test_texts_end_after_so_many_tokens(tokenizer):
    inputs = pooler(INFO, tokenizer).inputs
    texts = ["w7 w8 w9", "w7 w8", "", [2, 7, 3]]
    assert inputs.cut(texts, 2) == ["w7 w8", "w7 w8", "", [2, 7, 3]]
    assert inputs.cut("w7 w8 w9", 1) == "w7" and inputs.cut("w7 w8", 0) == "w7 w8"
    with pytest.raises(ValueError, match="need a tokenizer"):
        pooler().inputs.cut("w7", 1)


def test_an_empty_list_of_labels_returns_all():
    for info, labels in (
        (CLASSES, []),
        (dataclasses.replace(CLASSES, pooler=PoolerConfig(returned_token_ids=[])), None),
    ):
        params = PoolingParams(returned_token_ids=labels, use_activation=False)
        (output,) = pooler(info).reward([1], params).finish([np.eye(3)])
        assert output.outputs.data.shape == (3, 3)


@pytest.mark.parametrize("make", [PoolingParams, PoolerConfig])
@pytest.mark.parametrize("labels", [2, "12", {1: 2}, ["a"], [1.0], [True], [1, -1], [[1]]])
def test_labels_to_return_are_a_list_of_ints(make, labels):
    complaint = "returned_token_ids must be a list of ints of at least 0, got "
    with pytest.raises(ValueError, match=f"^{re.escape(f'{complaint}{labels!r}')}$"):
        make(returned_token_ids=labels)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: PoolingParams(dimensions=0), "dimensions must be at least 1"),
        (lambda: PoolingParams(dimensions=True), "must be an int"),
        (lambda: PoolingParams(task="reward"), "call LLM.reward"),
        (lambda: PoolingParams(truncate_prompt_tokens=0), "at least 1, or -1"),
        (lambda: PoolingParams(use_activation=1), "must be a bool"),
        (lambda: PoolerConfig(pooling_type="MAX"), "must be one of CLS, LAST, MEAN, ALL, STEP"),
        (lambda: to_pooler_config({"max_embed_len": 9}), "max_embed_len=9, which is not supported"),
        (lambda: to_pooler_config(3), "must be a PoolerConfig"),
    ],
)
def test_bad_parameters_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
