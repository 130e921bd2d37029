"""The hosts of an engine, from the perspective of one: what they agree on at start, and whether all are alive.

Knows messages and ranks; the leader has rank 0 and a connection to each other host, a follower has one to the leader.
Must not know what calls do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from jaxpage.hosts.errors import HostLostError
from jaxpage.hosts.wire import Connection, Kind
from jaxpage.runner.calls import Call
from jaxpage.runner.recording import LENGTH_BYTES, calls_frame, frame, parse

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 8.0  # a host that is silent for so long is lost
STUCK_SECONDS = 4.0  # programs that wait for a lost host may never end; then the process ends
_STOP_SECONDS = 5.0  # for followers to stop
_LAST_ACT_SECONDS = 1.0
_CAUSE_SECONDS = 2.0  # between a failed collective and the detection of a lost host

LEADER = 0


class Hosts:
    """The other hosts of this process's engine. `failure` is set as soon as one of them is lost, and stays set."""

    def __init__(self, rank: int, num_hosts: int, connections: Mapping[int, Connection]):
        """`connections` by rank, authenticated."""
        self.rank, self.num_hosts = rank, num_hosts
        self.failure: HostLostError | None = None
        self._connections = dict(connections)
        self._arrived: dict[int, SimpleQueue[bytes | None]] = {
            r: SimpleQueue() for r in connections
        }
        self._lock = threading.Lock()
        self._has_ended = threading.Event()  # by a stop or by a failure
        self._stopping = False  # closed connections are expected now
        self._follows = False
        self._num_entered, self._is_inside = 0, False
        self._when_lost: list[Callable[[HostLostError], None]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(r,), name=f"jaxpage-host-{r}", daemon=True)
            for r in self._connections
        ]
        beats = threading.Thread(target=self._beat, name="jaxpage-heartbeat", daemon=True)
        for thread in (*self._readers, beats):
            thread.start()

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def when_lost(self, callback: Callable[[HostLostError], None]) -> None:
        """Register a callback for the loss of a host. It is called once, from any thread; at once if one is lost."""
        with self._lock:
            failure = self.failure
            if failure is None:
                self._when_lost.append(callback)
        if failure is not None:
            callback(failure)

    # At start.

    def agree(
        self, mine: dict[str, Any], decide: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """The leader's decision from the values of all hosts, by rank; all return the same. Values are JSON.

        Raises what `decide` raises on the leader; HostLostError on the others, and if a host is lost.
        """
        if not self.is_leader:
            self._send(LEADER, mine)
            return self._take(LEADER)
        said = [mine, *(self._take(rank) for rank in sorted(self._connections))]
        decided = decide(said)
        for rank in self._connections:
            self._send(rank, decided)
        return decided

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """An error on one host ends the start on all hosts."""
        with self._inside():
            try:
                yield
            except BaseException as error:
                self.fail(f"host {self.rank} cannot start: {error or type(error).__name__}")
                raise

    # For the leader.

    @contextlib.contextmanager
    def executing(self, calls: list[Call]) -> Iterator[None]:
        """Send calls to all, and execute them here meanwhile. Raises HostLostError, also for errors here: the states of
        the hosts would diverge."""
        with self._failing_together(), self._inside():
            self._raise_if_lost()
            body = calls_frame(calls)[LENGTH_BYTES:]
            for connection in self._connections.values():
                connection.send(Kind.DATA, body)
            yield

    @contextlib.contextmanager
    def reading(self, arrays: Iterable[Any]) -> Iterator[None]:
        """Enter once jax has computed the arrays. Does not wait for a lost host: raises HostLostError."""
        with self._failing_together():
            start = time.monotonic()
            for array in arrays:
                while not array.is_ready():
                    self._raise_if_lost()
                    # Adds at most a twentieth of the waiting time.
                    time.sleep(min(1e-3, 2e-5 + (time.monotonic() - start) / 20))
            yield

    def stop(self) -> None:
        """Stop the engine, and the followers with it. Calling it again does nothing."""
        with self._lock:
            if self._stopping or self.failure is not None:
                return
            self._stopping = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(Kind.STOP)
        deadline = time.monotonic() + _STOP_SECONDS
        for reader in self._readers:  # ends with its connection
            if reader is not threading.current_thread():
                reader.join(max(0.0, deadline - time.monotonic()))
        self._has_ended.set()
        for connection in self._connections.values():
            connection.close()

    # For followers.

    def follow(self, execute: Callable[[bytes], object]) -> None:
        """Execute the leader's calls until it stops. If it fails, this process ends with exit code 1."""
        self._follows = True
        self._raise_if_lost()
        while (body := self._arrived[LEADER].get()) is not None:
            try:
                execute(body)
            except BaseException as error:
                self.fail(f"host {self.rank} has failed: {error or type(error).__name__}")
                raise

    def leave(self) -> None:
        """Tell the leader that this follower has stopped."""
        self._has_ended.set()
        self._connections[LEADER].close()

    # Failures.

    def fail(self, reason: str) -> None:
        """End the engine on all hosts. Calling it again does nothing."""
        with self._lock:
            if self.failure is not None or self._stopping:
                return
            failure = self.failure = HostLostError(
                f"{reason}. The engine of {self.num_hosts} hosts has ended; start all of them anew"
            )
            entered, callbacks = self._num_entered, self._when_lost
        if self._follows:
            # At once: jax ends this process without our message as soon as it misses the leader.
            _exit(failure, lambda: _tell(self._connections[LEADER], reason))
        self._has_ended.set()
        for queue in self._arrived.values():
            queue.put(None)
        for callback in callbacks:
            callback(failure)
        for connection in self._connections.values():
            threading.Thread(target=_tell, args=(connection, reason), daemon=True).start()
        if self._is_inside:
            threading.Thread(target=self._end_if_stuck, args=(entered,), daemon=True).start()

    def exit_if_lost(self) -> None:
        """At exit: without all hosts, jax's own shutdown would wait for the lost ones."""
        if self.failure is not None:
            _exit(None)

    def _raise_if_lost(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._stopping:
            raise HostLostError("the engine has ended, and the other hosts with it")

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """For code that may never end without the other hosts."""
        self._num_entered += 1
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except HostLostError:
            raise
        except Exception as error:
            # A collective fails as soon as a host is gone, perhaps before its connection closes.
            self._has_ended.wait(_CAUSE_SECONDS)
            self.fail(f"a step has failed on host {self.rank}: {error}")
            self._raise_if_lost()

    def _end_if_stuck(self, entered: int) -> None:
        time.sleep(STUCK_SECONDS)
        if self._is_inside and self._num_entered == entered:
            _exit(self.failure)

    # Messages.

    def _send(self, rank: int, values: dict[str, Any]) -> None:
        try:
            self._connections[rank].send(
                Kind.DATA, frame("values", [], values=values)[LENGTH_BYTES:]
            )
        except OSError as error:
            self.fail(f"host {rank} is lost: {error}")
            self._raise_if_lost()

    def _take(self, rank: int) -> dict[str, Any]:
        body = self._arrived[rank].get()
        if body is None:
            self._raise_if_lost()
            raise HostLostError(f"host {rank} has ended before the start was over")
        return parse(body)[1]["values"]

    def _read(self, rank: int) -> None:
        """Thread: reads messages from a host until its connection ends."""
        connection, arrived = self._connections[rank], self._arrived[rank]
        try:
            while True:
                kind, body = connection.receive()
                if kind is Kind.DATA:
                    arrived.put(body)
                elif kind is Kind.STOP:
                    self._stopping = True
                    arrived.put(None)
                    return
                elif kind is Kind.FAILED:
                    self.fail(body.decode(errors="replace"))
                    return
        except Exception as error:  # of the network, or an invalid message
            if not self._has_ended.is_set():
                self.fail(f"host {rank} is lost: {error}")

    def _beat(self) -> None:
        while not self._has_ended.wait(BEAT_SECONDS):
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the receiver will notice
                    connection.beat()


def differences(said: list[dict[str, Any]]) -> str | None:
    """The differences between a follower's values and the leader's, as text; None if there are none."""
    leader = said[LEADER]
    for rank, other in enumerate(said):
        for name in {**leader, **other}:
            if leader.get(name) != other.get(name):
                theirs, ours = (json.dumps(x.get(name), default=str) for x in (other, leader))
                return f"{name} is {theirs} on host {rank} and {ours} on host {LEADER}"
    return None


def _tell(connection: Connection, reason: str) -> None:
    """Send the reason of the failure to a host, which may not read it."""
    with contextlib.suppress(OSError):
        connection.send(Kind.FAILED, reason.encode())
    connection.close()


def end_with_main_thread(failure: HostLostError) -> None:
    """For `Hosts.when_lost`: at exit Python would wait for compilations that are no longer needed."""

    def end() -> None:
        while threading.main_thread().is_alive():
            time.sleep(0.2)
        time.sleep(STUCK_SECONDS)
        _exit(None)

    del failure  # waiting threads get it
    threading.Thread(target=end, daemon=True).start()


def _exit(failure: HostLostError | None, last_act: Callable[[], None] = lambda: None) -> None:
    """End this process now: calls that wait for a lost host, and jax's own shutdown, might never end."""
    if failure is not None:
        os.write(2, f"jaxpage: {failure}\n".encode())

    def act() -> None:
        last_act()
        sys.stdout.flush()
        sys.stderr.flush()

    acting = threading.Thread(target=act, daemon=True)  # may hang too
    acting.start()
    acting.join(_LAST_ACT_SECONDS)
    os._exit(1)
