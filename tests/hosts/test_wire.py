"""Messages between hosts: who may speak, and what is refused."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from jaxpage.hosts import wire
from jaxpage.hosts.errors import WireError
from jaxpage.hosts.wire import Kind, accept, connect
from tests.hosts.pairs import SECRET, connections, sockets


def side(function, *args, **options):
    """A thread that calls it, and a list of what it returns or raises."""
    found = []

    def run():
        try:
            found.append(function(*args, **options))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.fixture
def hosts():
    leader, follower = connections()
    yield leader, follower
    leader.close()
    follower.close()


def test_messages_arrive_in_both_directions_in_order(hosts):
    leader, follower = hosts
    for number in range(5):
        leader.send(Kind.DATA, bytes([number]) * number * 10_000)
        follower.send(Kind.FAILED, b"?")
        leader.beat()
    for number in range(5):
        assert follower.receive() == (Kind.DATA, bytes([number]) * number * 10_000)
        assert follower.receive() == (Kind.BEAT, b"")
        assert leader.receive() == (Kind.FAILED, b"?")


def test_another_secret_is_refused_on_both_sides():
    here, there = sockets()
    with here, there:
        thread, found = side(connect, there, b"another", 1, timeout=5.0)
        with pytest.raises(PermissionError, match="host 1 was refused.*JAXPAGE_HOSTS_SECRET"):
            accept(here, SECRET, timeout=5.0)
        thread.join()
        assert isinstance(found[0], PermissionError) and "JAXPAGE_HOSTS_SECRET" in str(found[0])


def test_a_leader_that_does_not_know_the_secret_is_refused():
    """It accepts everybody, but cannot prove anything."""
    here, there = sockets()
    with here, there:
        thread, found = side(connect, there, SECRET, 1, timeout=5.0)
        here.sendall(struct.pack("<7sB32s", b"jaxpage", wire.VERSION, bytes(32)))
        here.recv(1000)
        here.sendall(b"x" * 32)
        thread.join()
        assert isinstance(found[0], PermissionError)


def test_the_secret_is_never_sent():
    sent = []
    here, there = sockets()

    class Listening(socket.socket):
        def sendall(self, data):
            sent.append(bytes(data))
            return super().sendall(data)

    here, there = (Listening(fileno=s.detach()) for s in (here, there))
    thread, found = side(connect, there, SECRET, 1, timeout=5.0)
    _, leader = accept(here, SECRET, timeout=5.0)
    thread.join()
    leader.send(Kind.DATA, b"body")
    assert len(sent) == 4 and not any(SECRET in data for data in sent)
    leader.close()
    found[0].close()


@pytest.mark.parametrize(
    ("said", "message"),
    [(b"jaxpage\x09", "version 9 of the protocol, this one 1"), (b"GET / HT", "not jaxpage")],
)
def test_another_version_and_another_program_are_refused(said, message):
    here, there = sockets()
    with here, there:
        there.sendall(said + bytes(200))
        with pytest.raises(WireError, match=message):
            accept(here, SECRET, timeout=5.0)
    here, there = sockets()
    with here, there:
        here.sendall(said + bytes(200))
        with pytest.raises(WireError, match=message):
            connect(there, SECRET, 1, timeout=5.0)


@pytest.mark.parametrize("where", [0, 1, 12, 26])
def test_a_changed_byte_is_noticed(hosts, where):
    """Of the kind, the length, the checksum, the body."""
    leader, follower = hosts
    leader.send(Kind.DATA, b"0123456789")
    data = bytearray(follower._socket.recv(1000))
    data[where] ^= 2
    leader._socket.sendall(data + bytes(20))
    with pytest.raises(WireError, match="checksum"):
        follower.receive()


def test_a_repeated_message_is_refused(hosts):
    leader, follower = hosts
    leader.send(Kind.DATA, b"once")
    data = follower._socket.recv(1000)
    leader._socket.sendall(data + data)
    assert follower.receive() == (Kind.DATA, b"once")
    with pytest.raises(WireError, match="message 1 has a wrong checksum"):
        follower.receive()


def test_a_message_that_is_cut_off_is_refused(hosts):
    leader, follower = hosts
    leader.send(Kind.DATA, b"0123456789")
    data = follower._socket.recv(1000)
    leader._socket.sendall(data[:-4])
    leader.close()
    with pytest.raises(WireError, match="4 bytes too early"):
        follower.receive()


def test_absurd_lengths_are_refused_before_memory_is_taken(hosts):
    leader, follower = hosts
    leader._socket.sendall(struct.pack("<BQ16s", 1, 2**40, bytes(16)))
    with pytest.raises(WireError, match="1099511627776 bytes"):
        follower.receive()


def test_silence_is_told_after_a_time():
    leader, follower = connections(timeout=0.2)
    with pytest.raises(TimeoutError, match="nothing was heard"):
        follower.receive()
    leader.close()
    follower.close()


def test_a_peer_that_takes_nothing_does_not_hold_the_sender_for_ever():
    leader, follower = connections(timeout=0.3)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            leader.send(Kind.DATA, bytes(2**20))
    leader.close()
    follower.close()
