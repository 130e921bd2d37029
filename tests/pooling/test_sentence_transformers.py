"""Folders of sentence-transformers: what is read of them, and what is refused."""

from __future__ import annotations

import pytest

from jaxpage.pooling.sentence_transformers import has_modules, read_sentence_transformer
from tests.pooling.pooling_checkpoints import write_json, write_modules


def test_pooling_normalising_and_prompts(tmp_path):
    write_modules(tmp_path, pooling="cls", query="query: ")
    write_json(
        tmp_path / "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": True}
    )
    found = read_sentence_transformer(tmp_path)
    assert has_modules(tmp_path)
    assert (found.pooling, found.normalizes, found.dense) == ("CLS", True, ())
    assert (found.max_seq_length, found.lower_case) == (77, True)
    assert found.prompts == {"query": "query: "}


def test_newer_folders_name_the_pooling_mode(tmp_path):
    write_modules(tmp_path, normalize=False)
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    found = read_sentence_transformer(tmp_path)
    assert (found.pooling, found.normalizes) == ("LAST", False)


def test_a_folder_of_another_kind_says_nothing(tmp_path):
    found = read_sentence_transformer(tmp_path)
    assert found.pooling is None and not has_modules(tmp_path)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"1_Pooling/config.json": {"pooling_mode": "max"}}, "pools by max; it must be"),
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, "pools by cls and mean"),
        ({"modules.json": [{"type": "x.LSTM", "path": "1_LSTM"}]}, "a module 'LSTM'"),
        ({"modules.json": [{"type": "x.Transformer", "path": "0_BERT"}]}, "the model in 0_BERT"),
        ({"modules.json": [{"type": "x.Pooling", "path": "9_Pooling"}]}, "does not exist"),
        ({"modules.json": {}}, "must contain a list"),
        (
            {
                "modules.json": [{"type": "x.Dense", "path": "2_Dense"}],
                "2_Dense/config.json": {"in_features": 2, "out_features": 2},
            },
            "no model.safetensors",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(files, complaint, tmp_path):
    write_modules(tmp_path)
    for name, value in files.items():
        write_json(tmp_path / name, value)
    with pytest.raises(ValueError, match=complaint):
        read_sentence_transformer(tmp_path)
