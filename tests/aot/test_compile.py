"""`jaxpage compile` with the real compilers, for chips that are not here."""

from __future__ import annotations

import json

import pytest

from jaxpage.aot.targets import parse_target
from jaxpage.cli import main
from jaxpage.runner.program_store import survey
from tests.aot.tiny import CONFIG

pytestmark = pytest.mark.aot


def compile_tiny(tmp_path, target, *more) -> int:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    sizes = "--max-num-seqs 2 --max-num-batched-tokens 8 --max-model-len 512".split()
    output = ["--output", str(tmp_path / "programs"), "--target", target]
    return main(["compile", "--model", str(config), *output, *sizes, *more])


@pytest.mark.parametrize("target", ["v6e:1x1", "h200"])
def test_all_programs_are_serialised_for_a_target(tmp_path, target, capfd):
    assert compile_tiny(tmp_path, target) == 0
    lines = capfd.readouterr().out.splitlines()
    names = {"admit", "set masks", "set tokens", "decode R=2", "forward T=8", "sample R=2"}
    names |= {"score", "vocabulary"}
    compiled = {line[:20].strip() for line in lines if line.endswith("compiled")}
    assert compiled == names
    found = survey(tmp_path / "programs" / "programs")
    assert (found.num_sets, found.num_programs, found.damaged) == (1, len(names), ())
    (path,) = tmp_path.glob("programs/programs/*/facts.json")
    facts = json.loads(path.read_text())
    chip = parse_target(target).chip
    assert facts["device"] == f"{chip.platform} {chip.device_kind}"
    # Two sequences of 512 tokens fill it, and the null block.
    assert (
        f"num_blocks={2 * 512 // (128 if chip.platform == 'tpu' else 64) + 1}," in facts["KV pool"]
    )


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(tmp_path, capfd):
    (tmp_path / "programs").write_text("a file")
    assert compile_tiny(tmp_path, "v6e:2x2") == 2
    printed = capfd.readouterr()
    assert "programs cannot be written: File exists" in printed.err and printed.out == ""


def test_options_that_cannot_be_served_are_told(tmp_path, capsys):
    assert compile_tiny(tmp_path, "v6e:2x2", "--max-model-len", "100k") == 2
    assert "exceeds the 4096 positions" in capsys.readouterr().err
    assert compile_tiny(tmp_path, "v6e:2x2", "--gpu-memory-utilization", "1e-9") == 2
    assert "largest max_model_len that fits is 0" in capsys.readouterr().err
