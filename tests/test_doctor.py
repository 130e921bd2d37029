"""`jaxpage doctor`: what it says is looked at, and its exit code is the verdict."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxpage import doctor
from jaxpage.cli import main
from jaxpage.ops.implementations import Choice
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import compile_program
from pallas_kernels import hopper


def lowering():
    return jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((5,), "float32"))


@pytest.fixture
def cache(tmp_path):
    store = ProgramStore(tmp_path / "programs", {"jax": jax.__version__})
    program = compile_program("admit", lowering)
    store.save("admit", program.compiled)
    return tmp_path


def run(capsys, cache) -> tuple[int, str]:
    code = main(["doctor", "--compilation-cache-dir", str(cache)])
    return code, capsys.readouterr().out


def test_a_machine_that_is_well(capsys, cache):
    code, text = run(capsys, cache)
    assert code == 0, text
    assert f"jax                {jax.__version__}" in text
    assert "such as Qwen2.5-3B: plain XLA: the kernels are for TPUs and Hopper GPUs\n" in text
    assert "as Qwen3.5-4B's: plain XLA: the kernels are for TPUs and Hopper GPUs\n" in text
    assert "8 x cpu" in text and "1 programs" in text and "all is well" in text


def test_no_cache_is_said_and_is_no_fault(capsys):
    code, text = run(capsys, "off")
    assert code == 0 and "every start compiles everything" in text


def test_a_damaged_program_an_open_folder_and_a_missing_package_are_told(
    capsys, cache, monkeypatch
):
    (path,) = cache.glob("programs/*/*.program")
    path.write_bytes(path.read_bytes()[:-1])
    path.parent.chmod(0o777)
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "no-such-package"))
    code, text = run(capsys, cache)
    wrong = [line for line in text.splitlines() if "WRONG " in line]
    assert code == 1 and len(wrong) == 3
    assert "no-such-package" in wrong[0] and "damaged" in wrong[1] and "chmod o-w" in wrong[2]


def test_a_cache_that_cannot_be_written_is_told(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, text = run(capsys, tmp_path / "file")
    assert code == 1 and "cannot be written" in text


def test_a_device_that_computes_nonsense_is_told(capsys, cache, monkeypatch):
    monkeypatch.setattr(doctor, "_error_of_product", lambda device: 0.5)
    code, text = run(capsys, cache)
    assert code == 1 and "relative error of 5.0e-01" in text


def test_why_a_device_has_no_kernel_is_told(capsys, cache, monkeypatch):
    choice = Choice("xla", None, ("it is too old",))
    monkeypatch.setattr(doctor, "choose", lambda *asked, **options: choice)
    code, text = run(capsys, cache)
    assert code == 0 and "plain XLA: it is too old" in text


def test_a_compiler_that_does_not_work_is_told(capsys, cache, monkeypatch):
    said = {"tpu": ("install 'libtpu==0.0.42.*'", False), "gpu": ("it is not installed", True)}
    monkeypatch.setattr(doctor, "check_compiler", said.get)
    code, text = run(capsys, cache)
    wrong = [line for line in text.splitlines() if "WRONG " in line]
    assert code == 1 and len(wrong) == 1 and wrong[0].endswith("libtpu==0.0.42.*'")
    assert "it is not installed" in text


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((13, 0, 88), "ptxas 13.0.88 (/cuda/bin/ptxas) miscompiles stores to shared memory"),
        ((13, 1, 80), "13.1.80 (/cuda/bin/ptxas)"),
        (None, "version unknown (/cuda/bin/ptxas)"),
    ],
)
def test_the_assembler_of_gpus_is_told(capsys, cache, monkeypatch, version, said):
    """On a machine without a GPU it is no fault."""
    monkeypatch.setattr(hopper, "find_ptxas", lambda: Path("/cuda/bin/ptxas"))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: version)
    code, text = run(capsys, cache)
    assert code == 0 and said in text
