"""The tiny checkpoint is a real one: transformers loads it, and everybody gets the same."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpage import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny") / "checkpoint")


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*"))}


def test_another_process_builds_the_same_bytes(folder, tmp_path):
    command = [sys.executable, "-m", "jaxpage.tiny", str(tmp_path / "again")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(folder)


def test_a_finished_checkpoint_is_left_alone_and_nothing_else_is_left_behind(folder):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert tiny.build(folder) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else"):
        tiny.build(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="fire"):
        tiny.write_checkpoint(tmp_path / "new", tiny.TINY_CONFIG, write_more=fail)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_round_trips_any_text_and_uses_its_whole_vocabulary(folder):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(tokenizer) == tiny.TINY_CONFIG["vocab_size"]
    for text in ("The house.", " two  spaces\n\ttabs", "naïve 漢字 🙂", "\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == plain.encode(text).ids
    text = "".join(tiny.SENTENCES)
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.eos_token_id == tiny.TINY_CONFIG["eos_token_id"]


def test_chat_template_is_chatml(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == 1


def test_transformers_generates_from_every_weight(folder):
    """A missing tensor would be filled with fresh random numbers, an unexpected one dropped."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    inputs = torch.tensor([[5, 80, 300, 17]])
    logits = model(inputs).logits[0, -1].float()
    assert 1.0 < logits.std() < 4.0
    outputs = model.generate(inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    new = outputs[0, 4:].tolist()
    assert len(set(new)) > 4, f"a degenerate loop tests little: {new}"
