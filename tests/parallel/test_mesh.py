"""Which devices of several hosts share an engine."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from jaxpage.parallel import mesh as mesh_module
from jaxpage.parallel.mesh import check_hosts, mesh_of_hosts


@pytest.fixture
def hosts(monkeypatch):
    """Sets how many devices each host has."""

    def make(*counts: int) -> None:
        by_host = [[f"{i}.{j}" for j in range(count)] for i, count in enumerate(counts)]
        monkeypatch.setattr(jax, "process_count", lambda: len(counts))
        monkeypatch.setattr(jax, "local_devices", lambda process_index: by_host[process_index])
        monkeypatch.setattr(mesh_module, "tensor_mesh", list)

    return make


def test_all_devices_or_equally_many_of_each_host(hosts):
    hosts(2, 2)
    assert mesh_of_hosts(None) == ["0.0", "0.1", "1.0", "1.1"]
    assert mesh_of_hosts(2) == ["0.0", "1.0"]


@pytest.mark.parametrize(("counts", "wanted"), [((2, 2), 3), ((2, 2), 6), ((2, 4), None)])
def test_uneven_shares_are_refused(hosts, counts, wanted):
    hosts(*counts)
    text = ", ".join(map(str, counts))
    with pytest.raises(ValueError, match=f"cannot be shared evenly by 2 hosts with {text} devices"):
        mesh_of_hosts(wanted)


def test_a_mesh_of_other_processes_needs_hosts(monkeypatch):
    devices = [SimpleNamespace(process_index=i) for i in (0, 0, 1)]
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices))
    check_hosts(mesh, 1)  # one process sees all, whoever they belong to
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_hosts(mesh, 2)
    with pytest.raises(ValueError, match=r"processes \[0, 1\], but with nnodes=1 .* some of \[0\]"):
        check_hosts(mesh, 1)
