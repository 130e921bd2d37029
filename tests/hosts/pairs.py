"""Connected hosts within one process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from jaxpage.hosts.group import Hosts
from jaxpage.hosts.wire import Connection, accept, connect

SECRET = b"s" * 32


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    return here, there


def connections(rank: int = 1, timeout: float = 5.0) -> tuple[Connection, Connection]:
    """The leader's, and that of a follower."""
    here, there = sockets()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, there, SECRET, rank, timeout=timeout)
        _, leader = accept(here, SECRET, timeout=timeout)
        return leader, connecting.result()


def group(num_hosts: int = 3, timeout: float = 5.0) -> list[Hosts]:
    """All hosts of an engine."""
    pairs = {rank: connections(rank, timeout) for rank in range(1, num_hosts)}
    leader = Hosts(0, num_hosts, {rank: pair[0] for rank, pair in pairs.items()})
    return [leader, *(Hosts(rank, num_hosts, {0: pair[1]}) for rank, pair in pairs.items())]
