"""When a record of a compiled program counts, and that the records are what the compilers say."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from datetime import date, timedelta

import jax
import jax.numpy as jnp
import pytest

from tests.aot import evidence, sources
from tests.aot.compiling import Mode, compile_suite, missing
from tests.aot.program import hash_of, hash_of_observer
from tests.aot.sources import Sources
from tests.aot.suites import calls

RECORD = evidence.Record(text="text", observer="observer", found={"temp_bytes": 1})
EVIDENCE = evidence.Evidence(compiler="compiler 1", records={"a": RECORD})


def test_a_record_holds_for_the_same_text_observer_and_compiler():
    same = ("a", "text", "observer", "compiler 1")
    assert EVIDENCE.record_of(*same) == RECORD
    for index in range(len(same)):
        other = [value if i != index else "other" for i, value in enumerate(same)]
        assert EVIDENCE.record_of(*other) is None


def test_records_survive_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    both = dataclasses.replace(EVIDENCE, records={"b": RECORD, "a": RECORD})
    made_of = Sources(modules=("tests/aot/sources.py",), hash="hash")
    for kept in (both, dataclasses.replace(both, sources=made_of, device={"kind": "TPU v5e"})):
        evidence.write("suite", "v5e:2x2 TP 4", kept)
        assert evidence.read("suite", "v5e:2x2 TP 4") == kept
    assert evidence.read("suite", "h200") == evidence.Evidence()


@pytest.mark.parametrize(
    ("change", "is_unchanged"),
    [
        ("x = 1  # as before\n", True),
        ("x = 2\n", False),
        (None, False),
    ],
)
def test_records_hold_while_the_code_is_the_same(change, is_unchanged, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    ours, others = tmp_path / "jaxpage", tmp_path / "environment"
    for folder in (ours, others):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    module = ours / "imported_by_a_program.py"
    module.write_text("x = 1\n")
    (others / "installed.py").write_text("x = 1\n")
    for name in (module.stem, "installed"):
        importlib.import_module(name)
    now = sources.of_this_process()
    for name in (module.stem, "installed"):
        sys.modules.pop(name)
    assert now.modules == ("jaxpage/imported_by_a_program.py",)
    kept = dataclasses.replace(EVIDENCE, sources=now)
    assert kept.is_of_now("compiler 1") and not kept.is_of_now("compiler 2")
    assert not EVIDENCE.is_of_now("compiler 1")
    sources._code.cache_clear()
    module.unlink() if change is None else module.write_text(change)
    assert kept.is_of_now("compiler 1") == is_unchanged


def test_tuned_sizes_and_versions_are_part_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    hashes = [sources.of_this_process().hash]
    tuned = tmp_path / "pallas_kernels" / "lora" / "tuned"
    tuned.mkdir(parents=True)
    (tuned / "v6e.json").write_text("{}")
    hashes.append(sources.of_this_process().hash)
    monkeypatch.setattr(sources, "version", lambda package: "0.0")
    hashes.append(sources.of_this_process().hash)
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("call", calls(), ids=" ".join)
def test_the_code_that_a_record_depends_on_is_that_of_this_folder(call):
    """Not an installed copy's, whose changes would go unnoticed."""
    kept = evidence.read(*call).sources
    assert kept is not None
    assert {"jaxpage/__init__.py", f"tests/aot/{call[0]}.py"} <= set(kept.modules)


def test_each_program_has_its_turn():
    days = [date(2026, 1, 1) + timedelta(days=n) for n in range(evidence.DAYS)]
    for name in map(str, range(50)):
        assert sum(evidence.is_due("suite", "h200", name, day) for day in days) == 1


def test_the_hash_is_of_the_program_and_the_options_not_of_its_place():
    x = jnp.zeros(4)
    # fmt: off
    first = jax.jit(lambda x: x + 1).lower(x)
    second = jax.jit(
        lambda x: x + 1).lower(x)
    # fmt: on
    other = jax.jit(lambda x: x + 2).lower(x)
    options = {"xla_cpu_enable_fast_math": "true"}
    faster = jax.jit(lambda x: x + 1, compiler_options=options).lower(x)
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x)
    hashes = [hash_of(each) for each in (first, second, other, faster, donated)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


def test_the_hash_of_an_observer_is_of_its_code():
    def look(compiled, log):
        return {"number": 1}

    def other(compiled, log):
        return {"number": 2}

    assert hash_of_observer(look) == hash_of_observer(look) != hash_of_observer(other)


def test_words_about_an_observer_are_no_part_of_it():
    def silent():
        def look(compiled, log):
            return {"number": 1}

        return look

    def talkative():
        def look(compiled, log):
            """What it looks for."""
            return {"number": 1}  # and why

        return look

    assert hash_of_observer(silent()) == hash_of_observer(talkative())


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("call", calls(), ids=" ".join)
def test_the_records_are_what_the_compilers_say(call):
    """Of kernels that several programs share ptxas speaks when it assembles the first: that depends on the others."""
    if reason := missing(call[1]):
        pytest.skip(reason)
    kept, seen = evidence.read(*call), compile_suite(*call, Mode.ALL)
    assert seen.num_changed == 0, "write them anew: python -m tests.aot.evidence"
    for name, record in seen.evidence.records.items():
        expected = kept.records[name].found
        assert {k: v for k, v in record.found.items() if k != "spilled"} == {
            k: v for k, v in expected.items() if k != "spilled"
        }, name
