"""Compiled programs on disk: found again, or the reason why not; never wrong ones."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpage.runner.fingerprint import hash_of
from jaxpage.runner.program_store import MeasuredSizes, ProgramStore, survey
from jaxpage.runner.programs import compile_program

pytestmark = pytest.mark.usefixtures("fresh_cache")

FACTS = {"code": "1", "jax": "0.10.2", "KV pool": "num_blocks=4"}
NAME = "decode R=2"


def store_in(root, facts=FACTS) -> ProgramStore:
    return ProgramStore(root, facts, jax.local_devices()[:1])


def lowering():
    x = jnp.arange(4, dtype=jnp.float32)
    return jax.jit(lambda pool, y: (pool + y, {"sum": y.sum()}), donate_argnums=0).lower(x, x)


def never():
    raise AssertionError("lowered, although the executable is cached")


def stored(root):
    program = compile_program(NAME, lowering, store_in(root))
    assert program.origin == "compiled"
    return next(root.glob("*/*.program"))


def test_a_program_is_compiled_once_and_then_found(tmp_path):
    before = compile_program(NAME, lowering, store_in(tmp_path))
    after = compile_program(NAME, never, store_in(tmp_path))
    assert after.origin == "stored"
    assert (after.temp_bytes, after.alias_bytes) == (before.temp_bytes, before.alias_bytes)
    assert after.alias_bytes == 16
    for program in (before, after):
        pool = jnp.ones(4, jnp.float32)
        new, more = program.compiled(pool, jnp.arange(4, dtype=jnp.float32))
        assert new.tolist() == [1, 2, 3, 4] and more["sum"] == 6
        assert pool.is_deleted()  # donated


@pytest.mark.parametrize("name", FACTS)
def test_with_another_fact_it_is_not_found_and_the_log_can_say_which(tmp_path, name):
    stored(tmp_path)
    other = store_in(tmp_path, FACTS | {name: "other"})
    assert other.load(NAME) is None
    assert other.why_empty() == f"{name}: {FACTS[name]} is there, this is other"
    assert store_in(tmp_path).why_empty() is None


def test_the_reason_is_the_nearest_set_and_long_facts_are_cut_to_where_they_differ(tmp_path):
    compile_program(NAME, lowering, store_in(tmp_path, FACTS | {"jax": "9", "code": "9"}))
    long = {"KV pool": "x" * 100 + "num_blocks=5" + "y" * 100}
    compile_program(NAME, lowering, store_in(tmp_path, FACTS | long))
    asked = store_in(tmp_path, FACTS | {"KV pool": "x" * 100 + "num_blocks=7" + "y" * 100})
    reason = asked.why_empty()
    assert reason.startswith("KV pool: ...") and "=5y" in reason and "=7y" in reason
    assert len(reason) < 200


def test_nothing_is_said_of_an_empty_folder(tmp_path):
    assert store_in(tmp_path / "none").why_empty() is None


@pytest.mark.parametrize("damage", ["torn", "flipped", "another's"])
def test_a_damaged_program_is_compiled_anew(tmp_path, damage, caplog):
    path = stored(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "torn":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    else:  # whole, but under a wrong name
        path = path.rename(path.with_name("decode-R4.program"))
    path.write_bytes(data)
    assert survey(tmp_path).damaged == (str(path),)
    name = "decode R=4" if damage == "another's" else NAME
    assert compile_program(name, lowering, store_in(tmp_path)).origin == "compiled"
    assert "is damaged" in caplog.text
    assert compile_program(name, never, store_in(tmp_path)).origin == "stored"


def test_what_the_runtime_does_not_take_is_compiled_anew(tmp_path, monkeypatch, caplog):
    stored(tmp_path)

    def refused(*args, **options):
        raise jax.errors.JaxRuntimeError("made for another machine")

    monkeypatch.setattr("jaxpage.runner.program_store.deserialize_and_load", refused)
    assert compile_program(NAME, lowering, store_in(tmp_path)).origin == "compiled"
    assert "made for another machine" in caplog.text


def test_a_folder_that_everybody_may_write_to_is_not_read(tmp_path):
    folder = stored(tmp_path).parent
    folder.chmod(0o777)
    store = store_in(tmp_path)
    assert store.load(NAME) is None
    assert "can be written by others" in store.why_empty()
    assert survey(tmp_path).unsafe == (str(folder),)
    folder.chmod(0o700)
    assert store_in(tmp_path).load(NAME) is not None


def test_a_folder_that_cannot_be_written_costs_the_programs_and_nothing_else(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for name in (NAME, "decode R=4"):
        assert compile_program(name, lowering, store_in(blocked)).origin == "compiled"
    assert caplog.text.count("is not cached in") >= 1
    sizes = MeasuredSizes(blocked, FACTS)
    assert sizes.remember("a", lambda: 5) == 5
    assert sizes.remember("a", never) == 5


def test_a_folder_that_cannot_be_looked_at_is_not_read(tmp_path, monkeypatch):
    """Its parent is another user's. Tests may run as root, who can look everywhere."""

    def refused(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refused)
    store = store_in(tmp_path / "theirs")
    assert store.load(NAME) is None and store.why_empty() is None and not store.has(NAME)
    assert survey(tmp_path / "theirs").num_sets == 0


def test_programs_for_a_target_are_saved_and_never_run_here(tmp_path):
    store = ProgramStore(tmp_path, FACTS)
    compile_program(NAME, lowering, store)
    assert compile_program(NAME, lowering, store).origin == "compiled"
    assert store_in(tmp_path).load(NAME) is not None


def test_sizes_outlive_the_process_and_belong_to_their_facts(tmp_path):
    assert MeasuredSizes(tmp_path, FACTS).remember("forward T=64", lambda: 7) == 7
    assert MeasuredSizes(tmp_path, FACTS).remember("forward T=64", never) == 7
    assert MeasuredSizes(tmp_path, FACTS | {"jax": "9"}).remember("forward T=64", lambda: 8) == 8
    assert MeasuredSizes(None, FACTS).remember("forward T=64", lambda: 9) == 9
    (path,) = [
        p for p in tmp_path.glob("*.sizes") if json.loads(p.read_text()) == {"forward T=64": 7}
    ]
    for torn in ("{", "[]", '{"forward T=64": "7"}'):
        path.write_text(torn)
        assert MeasuredSizes(tmp_path, FACTS).remember("forward T=64", lambda: 6) == 6


def test_the_pool_of_the_last_time_is_taken_again_unless_it_is_too_large_or_much_too_small(
    tmp_path,
):
    sizes = MeasuredSizes(tmp_path, FACTS)
    assert sizes.settle("blocks", 1000) == 1000
    assert sizes.settle("blocks", 1100) == 1000
    assert sizes.settle("blocks", 999) == 999
    assert sizes.settle("blocks", 1111) == 1111


@pytest.mark.slow
def test_what_comes_from_jax_own_cache_is_not_stored(tmp_path):
    """XLA:CPU would write it without the functions that it calls."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    assert compile_program(NAME, lowering, store_in(tmp_path / "a")).origin == "compiled"
    assert compile_program(NAME, lowering, store_in(tmp_path / "b")).origin == "cached"
    assert store_in(tmp_path / "b").load(NAME) is None
    assert store_in(tmp_path / "a").load(NAME) is not None


def test_measured_sizes_are_of_the_code(tmp_path):
    """A kernel with other tiles is another program."""
    (tmp_path / "kernel" / "tuned").mkdir(parents=True)
    (tmp_path / "kernel" / "gpu.py").write_text("TILE = 64")
    hashes = [hash_of([tmp_path])]
    for name, text in (
        ("gpu.py", "TILE = 128"),
        ("tuned/h200.json", "1"),
        ("tuned/h200.json", "2"),
    ):
        (tmp_path / "kernel" / name).write_text(text)
        hashes.append(hash_of([tmp_path]))
    assert len(set(hashes)) == 4
    (tmp_path / "kernel" / "notes.txt").write_text("nothing")
    assert hash_of([tmp_path]) == hashes[-1]
