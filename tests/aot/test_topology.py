"""What a process that compiles for other hardware is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage.aot import topology
from jaxpage.aot.targets import parse_target


@pytest.mark.parametrize("folder", [Path("/wheels/nvidia/cu13"), None])
def test_mosaic_gpu_finds_the_same_assembler_as_xla(folder, monkeypatch):
    """It takes the first on the PATH, whatever XLA's flags say."""
    monkeypatch.setattr(topology, "cuda_folder", lambda: folder)
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin")
    told = dict(each.split("=", 1) for each in topology.environment(parse_target("h200")))
    if folder is None:
        assert "PATH" not in told
    else:
        assert told["PATH"] == "/wheels/nvidia/cu13/bin:/usr/local/bin:/usr/bin"
        assert "--xla_gpu_cuda_data_dir=/wheels/nvidia/cu13" in told["XLA_FLAGS"]
