"""Starts: which cache they find, and what is said of their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpage import cli
from jaxpage.bench import peers, startup
from jaxpage.demo import checkpoint


@pytest.fixture
def asked(monkeypatch):
    """Options of the starts. How full the cache was is the time to the first token."""
    found = []

    class FreshProcess:
        def __init__(self, target, **options):
            assert options == {"python": "python", "threads": 1}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ask(self, method, options):
            found.append(options)
            cache = Path(options["compilation_cache_dir"])
            full = len(list(cache.iterdir()))
            (cache / "program").touch()
            return {"first_token": full, "warm": 9 + len(found)}

    monkeypatch.setattr(peers, "RemoteObject", FreshProcess)
    return found


def test_starts_share_a_cache_that_is_empty_at_first(asked, tmp_path, capsys):
    path = tmp_path / "times.json"
    command = f"bench startup --model {checkpoint()} --rounds 3 --threads 1 --python python"
    command += f" --max-num-seqs 2 --block-size 8 --json {path}"
    assert cli.main(command.split()) == 0
    assert json.loads(path.read_text())["rounds"] == [
        {
            "cold": {"first_token": 0, "warm": warm},
            "cached": {"first_token": 1, "warm": warm + 1},
        }
        for warm in (10, 12, 14)
    ]
    for options in asked:
        assert options["model"] == str(checkpoint()) and options["block_size"] == 8
        assert (options["max_model_len"], options["max_num_seqs"]) == (1024, 2)
    assert len({options["compilation_cache_dir"] for options in asked}) == 3
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert rows[1][0] == "cold" and rows[1][-1] == "12.0 (10.0 to 14.0)"
    assert rows[2][0] == "cached" and rows[2][-1] == "13.0 (11.0 to 15.0)"


def test_one_round_has_no_range():
    times = {"first_token": 1.0, "warm": 9.25}
    assert startup.show([{"cold": times}]).splitlines()[1].split() == ["cold", "1.0", "9.2"]


def test_no_rounds_are_refused(capsys):
    assert cli.main(["bench", "startup", "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
