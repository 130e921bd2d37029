"""What the kernels for Hopper GPUs ask of jax and of ptxas."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from pallas_kernels import hopper

TEXT = """ptxas: NVIDIA (R) Ptx optimizing assembler
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:53:56_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""


def test_the_version_of_ptxas_is_read():
    assert hopper.parse_ptxas_version(TEXT) == (13, 0, 88)
    assert hopper.parse_ptxas_version("ptxas: command not found") is None


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ((12, 6, 85), None),
        ((12, 8, 61), "causal masking"),
        ((12, 8, 93), "causal masking"),
        ((12, 9, 41), "causal masking"),
        ((12, 9, 86), None),
        ((13, 0, 48), "stores to shared memory"),
        ((13, 0, 88), "stores to shared memory"),
        ((13, 1, 80), None),
        ((13, 5, 37), None),
        (None, None),
    ],
)
def test_versions_that_miscompile_are_refused(version, what):
    """CUDA 12.8.0 to 12.9.0, whose ptxas is 12.9.41, and 13.0."""
    reason = hopper.unsupported_ptxas(Path("/cuda/bin/ptxas"), version)
    if what is None:
        assert reason is None
    else:
        assert reason is not None and f"(/cuda/bin/ptxas) miscompiles {what}" in reason


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A ptxas on the PATH, first of all; returns a function that says what it prints."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "ptxas"

    def write(text: str) -> Path:
        path.write_text(f"#!/bin/sh\ncat <<END\n{text}\nEND\n")
        path.chmod(0o755)
        hopper.ptxas_version.cache_clear()
        return path

    yield write
    hopper.ptxas_version.cache_clear()


def test_the_first_ptxas_on_the_path_is_asked(ptxas):
    path = ptxas(TEXT)
    assert hopper.find_ptxas() == path
    assert f"ptxas 13.0.88 ({path}) miscompiles" in (hopper.unsupported_ptxas_here() or "")
    ptxas(TEXT.replace("V13.0.88", "V13.1.80"))
    assert hopper.unsupported_ptxas_here() is None
    ptxas("nonsense")
    assert hopper.unsupported_ptxas_here() is None


def test_without_a_ptxas_there_is_nothing_to_refuse(monkeypatch):
    monkeypatch.setattr(hopper, "find_ptxas", lambda: None)
    assert hopper.unsupported_ptxas_here() is None


@pytest.mark.parametrize(
    ("python", "advice"),
    [
        ((3, 12), ""),
        ((3, 11), "this is Python 3.11: make an environment with Python 3.12 and "),
    ],
)
def test_which_jax_to_install_is_said(monkeypatch, python, advice):
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    oldest, newest = (".".join(map(str, version)) for version in hopper.JAX_VERSIONS)
    assert hopper.unsupported_jax() == (
        f"the kernels need jax >= {oldest} and < {newest}, and this is 0.10.2; "
        f'{advice}install "jax[cuda13]>={oldest},<{newest}"'
    )
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert hopper.unsupported_jax() is None


def test_what_the_extra_installs_has_the_kernels():
    """On the Pythons for which there is such a jax."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    oldest, newest = (".".join(map(str, version)) for version in hopper.JAX_VERSIONS)
    assert f"\"jax[cuda13]>={oldest},<{newest}; python_version >= '3.12'\"" in text


def test_the_number_of_sms_is_that_of_the_device_that_is_compiled_for(monkeypatch):
    """The mesh's, otherwise the first device's; this machine has no GPU."""
    assert hopper.num_sms() == hopper.NUM_SMS
    gpu = AbstractDevice(device_kind="NVIDIA H100 PCIe", num_cores=114, platform="gpu")
    tpu = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    for device, number in ((gpu, 114), (tpu, hopper.NUM_SMS)):
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            assert hopper.num_sms() == number
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(core_count=114)])
    assert hopper.num_sms() == 114
