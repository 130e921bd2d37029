"""The measurement of `LLM.step()` runs every case and times every step of it."""

from __future__ import annotations

from tests.bench import llm_step


def test_every_case_is_timed(monkeypatch, capsys):
    for name, value in {"NUM_ROWS": 3, "CONTEXT": 8, "NUM_STEPS": 4}.items():
        monkeypatch.setattr(llm_step, name, value)
    llm_step.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("3 rows from 8 tokens")
    assert len(lines) == 3 * len(llm_step.CASES)
    for line in lines:
        assert int(line.split()[-2]) > 0
