"""How hosts find each other: jax's own start-up for the devices, then a connection to the leader for the calls.

The leader listens on the network of jax's coordinator, and publishes its address and a random key through the
coordinator. If the user gives a secret, it is mixed into the key, and never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import socket
import time

import jax
from jax._src import distributed  # the coordinator's key-value store has no public name

from jaxpage.config import EngineConfig
from jaxpage.environment import hosts_secret
from jaxpage.hosts.errors import WireError
from jaxpage.hosts.group import LEADER, SILENCE_SECONDS, Hosts
from jaxpage.hosts.wire import HANDSHAKE_SECONDS, Connection, accept, connect

logger = logging.getLogger("jaxpage")

JOIN_SECONDS = 300  # for the last host to join
_ADDRESS = "jaxpage/hosts"  # a key of the coordinator's store
# Longer than this package takes to detect a lost host, so that its error comes first.
_JAX_SILENCE_SECONDS, _JAX_SHUTDOWN_SECONDS = 100, 10


def join(options: EngineConfig) -> Hosts | None:
    """The other hosts of this engine; None if there are none. Call it before anything asks jax for devices.

    Raises ValueError for unsupported options, for options or a secret that jax or another host contradicts, and in a
    process that has had an engine of several hosts; RuntimeError if the hosts do not find each other.
    """
    if options.nnodes == 1:
        return None
    if not jax.distributed.is_initialized():
        _initialize(options)
    rank, num_hosts = jax.process_index(), jax.process_count()
    if num_hosts != options.nnodes:
        raise ValueError(f"nnodes={options.nnodes}, but jax has found {num_hosts} processes")
    if options.dist_init_addr is not None and options.node_rank != rank:
        raise ValueError(f"node_rank={options.node_rank}, but jax has given this process {rank}")
    store, address = distributed.global_state.client, distributed.global_state.coordinator_address
    if store is None or address is None:
        raise RuntimeError("jax.distributed has no coordinator; leave its initialize to jaxpage")
    if rank == LEADER:
        host = address.rpartition(":")[0].strip("[]")
        hosts = Hosts(rank, num_hosts, _listen(host, num_hosts, store))
    else:
        hosts = Hosts(rank, num_hosts, {LEADER: _call_leader(rank, store)})
        logger.info("host %d of %d: follows the leader, %s", rank, num_hosts, address)
    return hosts


def _initialize(options: EngineConfig) -> None:
    # Otherwise the coordinator ends all processes when one is lost, and waits for all when one ends.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    found = {}
    if options.dist_init_addr is not None:
        found = {
            "coordinator_address": options.dist_init_addr,
            "coordinator_bind_address": options.dist_init_addr,
            "num_processes": options.nnodes,
            "process_id": options.node_rank,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=_JAX_SILENCE_SECONDS,
            shutdown_timeout_seconds=_JAX_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        if found:
            raise
        raise ValueError(
            f"nnodes={options.nnodes}, but jax does not find the other hosts by itself here ({error}); give each host "
            "dist_init_addr=HOST:PORT, an address of host 0 with a free port, and its node_rank"
        ) from None


def _listen(host: str, num_hosts: int, store) -> dict[int, Connection]:
    """Connections to all followers."""
    key = secrets.token_hex(32)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=num_hosts) as server:
        try:
            store.key_value_set(_ADDRESS, f"{host} {server.getsockname()[1]} {key}")
        except jax.errors.JaxRuntimeError:
            raise ValueError(
                "this process has had an engine of several hosts, whose followers have ended; "
                "start a new process on each host"
            ) from None
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + JOIN_SECONDS
        while len(connections) < num_hosts - 1:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                sock, address = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, num_hosts)) - set(connections))
                raise RuntimeError(
                    f"hosts {missing} have not come within {JOIN_SECONDS} s"
                ) from None
            try:
                rank, connection = accept(sock, _secret(key), timeout=SILENCE_SECONDS)
            except PermissionError as error:
                _wait_until_closed(sock)
                raise ValueError(str(error)) from None
            except OSError as error:
                sock.close()
                logger.warning("a connection from %s was refused: %s", address[0], error)
            else:
                connections[rank] = connection
    return connections


def _call_leader(rank: int, store) -> Connection:
    host, port, key = store.blocking_key_value_get(_ADDRESS, JOIN_SECONDS * 1000).split()
    try:
        sock = socket.create_connection((host, int(port)), timeout=SILENCE_SECONDS)
    except OSError as error:
        raise RuntimeError(f"the leader does not answer at {host}:{port}: {error}") from None
    try:
        return connect(sock, _secret(key), rank, timeout=SILENCE_SECONDS)
    except PermissionError as error:
        # Before the leader ends: jax aborts processes that are still its clients then.
        jax.distributed.shutdown()
        sock.close()
        raise ValueError(str(error)) from None
    except WireError as error:
        sock.close()
        raise RuntimeError(f"no connection to the leader at {host}:{port}: {error}") from None


def _wait_until_closed(sock: socket.socket) -> None:
    """Until the other side, which was rejected, has closed the connection."""
    with sock, contextlib.suppress(OSError):
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.recv(1)


def _secret(key: str) -> bytes:
    return hashlib.sha256(bytes.fromhex(key) + hosts_secret()).digest()
