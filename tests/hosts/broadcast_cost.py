"""What a decode step costs more with one follower, without its computation: `python -m tests.hosts.broadcast_cost`.

Prints medians in microseconds: the leader's time to send the calls, and from there until a follower has them parsed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np

from jaxpage.hosts.group import Hosts
from jaxpage.hosts.wire import accept, connect
from jaxpage.runner.calls import Call
from jaxpage.runner.recording import parse, read_calls
from tests.hosts.pairs import SECRET

NUM_STEPS, WORDS = 2000, 1500  # int32s of a decode step of 256 rows


def follow(port: int) -> None:
    import socket

    sock = socket.create_connection(("127.0.0.1", port))
    hosts = Hosts(1, 2, {0: connect(sock, SECRET, 1, timeout=10.0)})
    times: list[int] = []

    def execute(body: bytes) -> None:
        read_calls(*parse(body)[1:])
        times.append(time.monotonic_ns())

    hosts.follow(execute)
    print(*times)
    hosts.leave()


def main() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-m", __spec__.name, port]
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        _, connection = accept(server.accept()[0], SECRET, timeout=10.0)
    hosts = Hosts(0, 2, {1: connection})
    step = [Call("decode R=256", (np.arange(WORDS, dtype=np.int32),))]
    starts, sent = [], []
    for _ in range(NUM_STEPS):
        starts.append(time.monotonic_ns())
        with hosts.executing(step):
            sent.append(time.monotonic_ns())
        time.sleep(0.001)
    hosts.stop()
    parsed = [int(text) for text in follower.communicate()[0].split()]
    to_send = statistics.median(b - a for a, b in zip(starts, sent, strict=True)) / 1000
    to_arrive = statistics.median(b - a for a, b in zip(sent, parsed, strict=True)) / 1000
    print(f"{to_send:.0f} to send a step of {4 * WORDS} bytes, {to_arrive:.0f} until it is parsed")


if __name__ == "__main__":
    follow(int(sys.argv[1])) if len(sys.argv) > 1 else main()
