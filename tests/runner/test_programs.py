import os
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxpage.runner.programs import (
    CompilationCounter,
    ProgramRecord,
    Programs,
    use_persistent_cache,
)


def lowering(scale, compiled=None):
    def lower():
        if compiled is not None:
            compiled.append(scale)
        return jax.jit(lambda x: x * jnp.float32(scale)).lower(jnp.ones(3, jnp.float32))

    return lower


def test_programs_are_compiled_in_order_behind_whoever_waits_for_one():
    order = []
    programs = Programs({str(n): lowering(n, order) for n in range(8)})
    programs.start([str(n) for n in (2, 3, 0, 1, 4, 5, 6, 7)])
    assert programs.wait_for([["2"]]) == 0
    programs.wait()
    assert sorted(order) == list(range(8)) and {2, 3} & set(order[:2])  # none twice
    assert programs["3"](jnp.ones(3, jnp.float32)).tolist() == [3.0, 3.0, 3.0]
    assert programs.seconds > 0


def test_records_say_of_every_program_whether_it_is_there_and_what_it_took():
    programs = Programs({"first": lowering(1), "second": lowering(2)})
    programs.wait_for([["second"]])
    first, second = programs.records()
    assert first == ProgramRecord(name="first")
    ready = programs.ready["second"]
    assert (second.name, second.origin) == ("second", ready.origin)
    assert second.origin in ("compiled", "cached")
    assert (second.seconds, second.temp_bytes) == (ready.seconds, ready.temp_bytes)
    assert second.seconds > 0 and second.executable is programs["second"]


def test_who_waits_gets_the_first_choice_that_is_ready():
    gate = threading.Event()

    def held():
        gate.wait()
        return lowering(5)()

    programs = Programs({"held": held, "free": lowering(1)})
    programs.start(["free", "held"])
    programs.wait_for([["free"]])
    assert programs.wait_for([["held"], ["free"]]) == 1
    waiting = threading.Thread(target=programs.wait_for, args=([["held", "free"]],))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert programs["held"](jnp.ones(3, jnp.float32)).tolist() == [5.0, 5.0, 5.0]


def test_who_needs_a_program_that_nobody_compiles_any_more_compiles_it(monkeypatch):
    order = []
    programs = Programs({str(n): lowering(n, order) for n in range(3)})
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)  # as if a server outlived it
    programs.start(["0", "1", "2"])
    for thread in programs._threads:
        thread.join()
    assert order == []
    assert programs.wait_for([["1", "2"], ["0"]]) == 0 and order == [1, 2]
    assert programs["0"](jnp.ones(3, jnp.float32)).tolist() == [0.0, 0.0, 0.0]


def test_the_manifest_has_a_line_for_each_program():
    programs = Programs({str(n): lowering(n) for n in range(3)})
    programs.start(["0", "1", "2"])
    programs.wait()
    lines = programs.manifest().splitlines()
    assert sorted(line.split()[0] for line in lines[1:-1]) == ["0", "1", "2"]
    assert lines[-1].startswith("3 programs in ")


def test_a_program_that_was_not_started_compiles_at_first_use_and_once():
    order = []
    programs = Programs({"a": lowering(7, order)})
    for _ in range(2):
        assert programs["a"](jnp.ones(3, jnp.float32)).tolist() == [7.0, 7.0, 7.0]
    assert order == [7]


def test_what_the_compiler_raised_in_the_background_is_raised_to_whoever_waits():
    def broken():
        raise RuntimeError("no such instruction")

    programs = Programs({"good": lowering(1), "bad": broken})
    programs.start(["good", "bad"])
    with pytest.raises(RuntimeError, match="no such instruction"):
        programs.wait()
    with pytest.raises(RuntimeError, match="no such instruction"):
        programs.wait_for([["bad"]])
    with pytest.raises(RuntimeError, match="no such instruction"):
        programs["bad"]
    assert programs.wait_for([["bad"], ["good"]]) == 1


def test_only_compilations_of_the_watching_thread_count():
    counter = CompilationCounter()
    x = jnp.ones(5, jnp.float32)
    with counter.watching():
        thread = threading.Thread(target=lambda: jax.jit(lambda x: x + 5)(x).block_until_ready())
        thread.start()
        thread.join()
        assert counter.num_compilations == 0
        jax.jit(lambda x: x - 5)(x)
        assert counter.num_compilations == 1
    jax.jit(lambda x: x * 5)(x)
    assert counter.num_compilations == 1


def test_programs_are_kept_apart_by_the_number_of_cores_they_were_compiled_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_persistent_cache(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "3-cores")
        use_persistent_cache(str(tmp_path / "other"))  # a folder chosen before wins
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "3-cores")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_folder_that_cannot_be_made_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_persistent_cache(str(tmp_path / "file" / "xla"))
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (record,) = caplog.records
    for part in (str(tmp_path / "file" / "xla"), "Not a directory", "compilation_cache_dir", "off"):
        assert part in record.message
