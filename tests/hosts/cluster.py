"""Hosts of one engine as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.hosts.host import Job

ROOT = Path(__file__).parents[2]


class Host:
    """A process, and what it says."""

    def __init__(self, module: str, *arguments: str, num_devices: int = 1, **environment: str):
        flag = "--xla_force_host_platform_device_count="
        flags = re.sub(rf"{flag}\d+", f"{flag}{num_devices}", os.environ["XLA_FLAGS"])
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.without_torch", module, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags} | environment,
            stdout=self._out,
            stderr=self._err,
        )

    def said(self) -> list[dict[str, Any]]:
        """The lines of JSON so far."""
        self._out.seek(0)
        lines = self._out.read().splitlines(keepends=True)
        return [json.loads(x) for x in lines if x.startswith("{") and x.endswith("\n")]

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._err.seek(0)
        return self._err.read()

    def wait_for_lines(self, count: int, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while len(self.said()) < count:
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < deadline, f"{self.said()} {self.errors()}"
            time.sleep(0.05)

    def exit_code(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def cluster(
    job: Job,
    num_hosts: int = 2,
    *,
    num_devices: int = 1,
    own: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    secrets: Sequence[str] = (),
    **environment: str,
) -> Iterator[list[Host]]:
    """Hosts with the same job, the leader first. `own`: further options of some of them; `secrets`: of each."""
    address = f"127.0.0.1:{free_port()}"
    hosts = [
        Host(
            "tests.hosts.host",
            job.to_json(
                nnodes=num_hosts, node_rank=rank, dist_init_addr=address, **own.get(rank, {})
            ),
            num_devices=num_devices,
            JAXPAGE_HOSTS_SECRET=secrets[rank] if secrets else "",
            **environment,
        )
        for rank in range(num_hosts)
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.close()


def run(
    job: Job, num_hosts: int, *, num_devices: int = 1, seconds: float = 600, **environment: str
) -> list[dict]:
    """What the leader says, when all have ended in order."""
    with cluster(job, num_hosts, num_devices=num_devices, **environment) as hosts:
        for host in hosts:
            assert host.exit_code(seconds) == 0, host.errors()
        return hosts[0].said()
