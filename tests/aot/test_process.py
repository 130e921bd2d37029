"""Processes that compile, and what is said of compilers that are missing, or do not match jax."""

from __future__ import annotations

import sys
import time

import pytest

from jaxpage.aot import check, process, topology
from jaxpage.aot.targets import parse_target

TARGET = parse_target("v6e:2x2")

CHILD = """
import os, sys, time
from jaxpage.aot.process import serve

def work(request, report):
    report({"begun": request["what"]})
    print("words of a compiler")
    print("warnings of a compiler", file=sys.stderr)
    match request["what"]:
        case "refuse": raise ValueError("no such model")
        case "fail": raise RuntimeError("RET_CHECK: 4 operands *** Begin stack trace *** a() b()")
        case "die": os._exit(7)
        case "hang": time.sleep(60)
    return {"platforms": os.environ["JAX_PLATFORMS"]}

serve(work)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "child_of_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    return "child_of_test"


@pytest.fixture
def versions(monkeypatch):
    """jax 0.10.2 with some version of libtpu."""

    def use(libtpu: str) -> None:
        found = {"jax": "0.10.2", "libtpu": libtpu}
        wanted = ["jaxlib==0.10.2", 'libtpu==0.0.42.*; extra == "tpu"', 'x; extra == "k8s"']
        monkeypatch.setattr(topology.metadata, "version", lambda name: found[name])
        monkeypatch.setattr(topology.metadata, "requires", lambda name: wanted)

    return use


def test_a_result_and_the_reports_before_it_come_back(child):
    reports = []
    result = process.run(child, {"what": "work"}, TARGET, on_report=reports.append)
    assert result == {"platforms": "cpu"} and reports == [{"begun": "work"}]


def test_what_the_module_refuses_is_raised_as_it_is(child):
    with pytest.raises(ValueError, match="^no such model$"):
        process.run(child, {"what": "refuse"}, TARGET)


def test_a_compiler_that_fails_is_told_in_one_sentence_with_what_to_install(child, versions):
    versions("0.0.52")
    with pytest.raises(ValueError) as error:
        process.run(child, {"what": "fail"}, TARGET)
    assert str(error.value) == (
        "compiling for v6e:2x2 failed: RuntimeError: RET_CHECK: 4 operands; libtpu 0.0.52 is installed, but jax "
        "0.10.2 requires libtpu==0.0.42.*: pip install 'libtpu==0.0.42.*'"
    )
    versions("0.0.42.1")
    with pytest.raises(ValueError, match="RET_CHECK: 4 operands$"):
        process.run(child, {"what": "fail"}, TARGET)


def test_a_process_that_dies_or_hangs_is_told(child, versions):
    versions("0.0.42.1")
    with pytest.raises(ValueError, match="ended with status 7: warnings of a compiler"):
        process.run(child, {"what": "die"}, TARGET)
    start = time.monotonic()
    with pytest.raises(ValueError, match="no answer within 0.3 s"):
        process.run(child, {"what": "hang"}, TARGET, timeout=0.3)
    assert time.monotonic() - start < 30


def test_the_version_to_install_is_the_one_that_jax_names(monkeypatch, versions):
    versions("0.0.52")
    assert topology.wanted_version("tpu") == "==0.0.42.*"
    monkeypatch.setattr(topology, "_is_installed", lambda module: False)
    assert "pip install 'libtpu==0.0.42.*'" in (topology.missing_compiler("tpu") or "")
    # Of the jax that is here, too.
    monkeypatch.undo()
    assert topology.wanted_version("tpu").startswith("==0.0.")
    assert topology.wanted_version("gpu")


def test_doctor_says_what_the_compiler_said(monkeypatch):
    monkeypatch.setattr(check, "missing_compiler", lambda platform: None)

    def failing(*args, **options):
        raise ValueError("compiling for v6e:2x2 failed: pip install 'libtpu==0.0.42.*'")

    monkeypatch.setattr(check, "run", failing)
    text, is_well = check.check_compiler("tpu")
    assert "libtpu==0.0.42.*" in text and not is_well
    monkeypatch.setattr(check, "missing_compiler", lambda platform: "it is not installed")
    assert check.check_compiler("tpu") == ("it is not installed", True)


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_compilers_of_this_environment_work(platform):
    text, is_well = check.check_compiler(platform)
    assert is_well and "compiled a step in" in text
