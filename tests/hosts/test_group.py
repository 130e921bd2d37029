"""Hosts of one engine: what they agree on, what they send, and how they notice that one is lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxpage.config import EngineConfig
from jaxpage.hosts import group as group_module
from jaxpage.hosts.agreement import smallest
from jaxpage.hosts.errors import HostLostError
from jaxpage.hosts.group import differences
from jaxpage.hosts.join import join
from jaxpage.runner.calls import Call
from jaxpage.runner.recording import parse, read_calls
from tests.hosts.pairs import connections, group


@pytest.fixture
def exits(monkeypatch):
    """What would have ended this process."""
    found = []

    def exit(failure, last_act=lambda: None):
        found.append(failure)
        last_act()

    monkeypatch.setattr(group_module, "_exit", exit)
    return found


@pytest.fixture
def hosts():
    found = group()
    yield found
    close(found)


def close(hosts):
    for host in hosts:
        host._stopping = True
    for host in hosts:
        for connection in host._connections.values():
            connection.close()
        host._has_ended.set()


def on_all(hosts, function):
    """What `function(host)` returns or raises on each."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        futures = [pool.submit(function, host) for host in hosts]
        return [future.exception(20) or future.result() for future in futures]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sizes_are_the_smallest(hosts):
    sizes = [{"blocks": 7, "tokens": 30}, {"blocks": 9, "tokens": 10}, {"blocks": 8, "tokens": 40}]
    found = on_all(hosts, lambda host: smallest(host, sizes[host.rank]))
    assert found == [{"blocks": 7, "tokens": 10}] * 3


def test_hosts_that_differ_are_told_so_on_all(hosts):
    def decide(said):
        if found := differences(said):
            raise ValueError(f"but {found}")
        return {}

    def start(host):
        with host.starting():
            host.agree({"seed": 0 if host.rank < 2 else 5}, decide)

    leader, *followers = on_all(hosts, start)
    assert isinstance(leader, ValueError) and "seed is 5 on host 2 and 0 on host 0" in str(leader)
    for error in followers:
        assert isinstance(error, HostLostError) and "seed is 5 on host 2" in str(error)


def test_options_that_one_host_lacks_differ():
    assert differences([{"a": 1}, {"a": 1}]) is None
    assert differences([{"a": 1}, {"a": 1, "b": 2}]) == "b is 2 on host 1 and null on host 0"


def test_followers_execute_what_the_leader_does_in_order(hosts):
    sent = [[Call("admit", (np.arange(5),)), Call("decode R=8", (np.ones((2, 3), np.float32),))]]
    sent += [[Call("reset")] for _ in range(20)]
    executed = {1: [], 2: []}
    threads = [
        threading.Thread(target=host.follow, args=(executed[host.rank].append,))
        for host in hosts[1:]
    ]
    for thread in threads:
        thread.start()
    for calls in sent:
        with hosts[0].executing(calls):
            pass
    stopping = threading.Thread(target=hosts[0].stop)  # waits until the others have left
    stopping.start()
    for thread, host in zip(threads, hosts[1:], strict=True):
        thread.join(10)
        host.leave()
    stopping.join(10)
    assert not stopping.is_alive()
    for bodies in executed.values():
        received = [read_calls(*parse(body)[1:]) for body in bodies]
        assert [[c.program for c in r] for r in received] == [[c.program for c in s] for s in sent]
        for ours, theirs in zip(sent[0], received[0], strict=True):
            np.testing.assert_array_equal(ours.buffers[0], theirs.buffers[0])


class Never:
    """An array that is never computed."""

    def is_ready(self):
        return False


def test_a_lost_follower_ends_what_waits_for_it(hosts, exits):
    told = []
    hosts[0].when_lost(told.append)
    hosts[2]._follows = True
    threading.Timer(0.1, hosts[1]._connections[0].close).start()
    hosts[1]._stopping = True
    with pytest.raises(HostLostError, match="host 1 is lost.*start all of them anew"):
        with hosts[0].reading([Never()]):
            pass
    with pytest.raises(HostLostError, match="host 1 is lost"):
        with hosts[0].executing([]):
            pass
    wait_until(lambda: told)
    late = []
    hosts[0].when_lost(late.append)
    assert told == late == [hosts[0].failure]
    wait_until(lambda: exits)  # the other follower, with the same reason
    assert "host 1 is lost" in str(exits[0])


def test_a_host_that_says_nothing_is_lost(exits):
    """As one whose machine has stopped: its connection stays."""
    silent, other = connections(timeout=0.3)
    leader = group_module.Hosts(0, 2, {1: silent})
    wait_until(lambda: leader.failure)
    assert "host 1 is lost: nothing was heard for 0 s" in str(leader.failure)
    close([leader])
    other.close()


def test_what_never_returns_from_the_device_ends_the_process(hosts, exits, monkeypatch):
    monkeypatch.setattr(group_module, "STUCK_SECONDS", 0.1)
    with hosts[0]._inside():
        hosts[0].fail("host 1 is lost")
        wait_until(lambda: exits)
    assert exits == [hosts[0].failure]


def test_a_step_that_fails_here_fails_on_all(hosts, exits, monkeypatch):
    monkeypatch.setattr(group_module, "_CAUSE_SECONDS", 0.1)
    with pytest.raises(HostLostError, match="a step has failed on host 0: out of memory"):
        with hosts[0].executing([]):
            raise RuntimeError("out of memory")
    for host in hosts[1:]:
        wait_until(lambda host=host: host.failure)
        assert "out of memory" in str(host.failure)


def test_a_failed_step_is_told_as_the_loss_that_caused_it(hosts, exits):
    """Collectives fail as soon as a host is gone; its connection tells so a moment later."""
    threading.Timer(0.3, lambda: hosts[0].fail("host 2 is lost")).start()
    with pytest.raises(HostLostError, match="host 2 is lost"):
        with hosts[0].executing([]):
            raise RuntimeError("connection closed by peer")


def test_a_follower_that_fails_is_told_to_the_leader(hosts, exits):
    def execute(body):
        raise MemoryError("no room")

    with hosts[0].executing([Call("reset")]):
        pass
    with pytest.raises(MemoryError):
        hosts[1].follow(execute)
    wait_until(lambda: hosts[0].failure)
    assert "host 1 has failed: no room" in str(hosts[0].failure)


def test_an_engine_that_has_ended_takes_no_calls(hosts, monkeypatch):
    monkeypatch.setattr(group_module, "_STOP_SECONDS", 0.1)
    hosts[0].stop()
    with pytest.raises(HostLostError, match="has ended"):
        with hosts[0].executing([]):
            pass


def test_hosts_that_jax_does_not_find_must_be_named(monkeypatch):
    def initialize(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    monkeypatch.setattr("jax.config.update", lambda *args: None)
    with pytest.raises(ValueError, match="nnodes=2, but jax does not .* dist_init_addr=HOST:PORT"):
        join(EngineConfig(model="m", nnodes=2))
