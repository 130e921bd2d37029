"""Messages between two hosts that share a secret, over TCP.

Both sides prove that they know the secret without sending it: each answers the other's random challenge with an HMAC.
After that a message is a header and a body. The header has the kind, the length, and a keyed hash of both, the body and
the message's number; so damaged, repeated or injected messages are rejected. Nothing is encrypted, and nothing is ever
unpickled. Knows bytes only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from enum import IntEnum

from jaxpage.hosts.errors import WireError

MAGIC, VERSION = b"jaxpage", 1
MAX_BYTES = 2**30  # of a body
HANDSHAKE_SECONDS = 10.0
SECRET_DIFFERS = (
    "the two sides have different secrets; set JAXPAGE_HOSTS_SECRET to the same everywhere"
)

_HEADER = struct.Struct("<BQ16s")  # kind, length of the body, hash
_HELLO = struct.Struct("<7sB32s")  # magic, version, challenge
_ANSWER = struct.Struct("<7sBI32s32s")  # magic, version, rank, challenge, proof
_PROOF = struct.Struct("<32s")
_REFUSED = bytes(32)  # instead of a proof


class Kind(IntEnum):
    """The kind of a message."""

    BEAT = 0  # the sender is alive
    DATA = 1  # for the waiting reader
    STOP = 2  # the leader stops
    FAILED = 3  # the engine has failed; the body is the reason, in UTF-8


class Connection:
    """Messages to one other host. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket, *, key: bytes, is_leader: bool, timeout: float):
        """`timeout`: seconds of silence, or of a peer that does not receive, after which the connection is dead."""
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout = sock, timeout
        ours, theirs = (b"leader", b"follower") if is_leader else (b"follower", b"leader")
        self._send_key, self._receive_key = (_mac(key, name) for name in (ours, theirs))
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Raises OSError if the other side is gone, or does not receive for too long."""
        with self._sending:
            self._send(kind, body)

    def beat(self) -> None:
        """Send a sign of life, unless another message is being sent."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(Kind.BEAT, b"")
            finally:
                self._sending.release()

    def receive(self) -> tuple[Kind, bytes]:
        """The next message. Raises WireError for an invalid one, OSError if the connection fails, and TimeoutError, an
        OSError, after too long a silence."""
        try:
            kind, length, tag = _HEADER.unpack(_read(self._socket, _HEADER.size))
            if length > MAX_BYTES:
                raise WireError(f"a message of {length} bytes; {MAX_BYTES} are the most")
            body = _read(self._socket, length)
        except TimeoutError:
            raise TimeoutError(f"nothing was heard for {self._timeout:.0f} s") from None
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, kind, body)):
            raise WireError(f"message {self._num_received} has a wrong checksum")
        self._num_received += 1
        return Kind(kind), body

    def close(self) -> None:
        """Wakes the receiving thread. Calling it again does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: Kind, body: bytes) -> None:
        header = _HEADER.pack(kind, len(body), _tag(self._send_key, self._num_sent, kind, body))
        self._num_sent += 1
        self._socket.sendall(header + body)


def accept(sock: socket.socket, secret: bytes, *, timeout: float) -> tuple[int, Connection]:
    """The leader's side of a new connection; returns the other's rank too. `timeout` as in `Connection`.

    Raises WireError if the other side is not jaxpage of this version, PermissionError if it has another secret.
    """
    sock.settimeout(HANDSHAKE_SECONDS)
    challenge = secrets.token_bytes(32)
    sock.sendall(_HELLO.pack(MAGIC, VERSION, challenge))
    magic, version, rank, their_challenge, proof = _ANSWER.unpack(_read(sock, _ANSWER.size))
    _check_version(magic, version)
    said = challenge + their_challenge + rank.to_bytes(4, "little")
    if not hmac.compare_digest(proof, _mac(secret, b"follower" + said)):
        sock.sendall(_REFUSED)
        raise PermissionError(f"host {rank} was refused: {SECRET_DIFFERS}")
    sock.sendall(_mac(secret, b"leader" + said))
    key = _mac(secret, b"session" + said)
    return rank, Connection(sock, key=key, is_leader=True, timeout=timeout)


def connect(sock: socket.socket, secret: bytes, rank: int, *, timeout: float) -> Connection:
    """The follower's side. Raises like `accept`."""
    sock.settimeout(HANDSHAKE_SECONDS)
    magic, version, challenge = _HELLO.unpack(_read(sock, _HELLO.size))
    _check_version(magic, version)
    ours = secrets.token_bytes(32)
    said = challenge + ours + rank.to_bytes(4, "little")
    sock.sendall(_ANSWER.pack(MAGIC, VERSION, rank, ours, _mac(secret, b"follower" + said)))
    (proof,) = _PROOF.unpack(_read(sock, _PROOF.size))
    if not hmac.compare_digest(proof, _mac(secret, b"leader" + said)):
        raise PermissionError(f"host 0 and this host, {rank}: {SECRET_DIFFERS}")
    key = _mac(secret, b"session" + said)
    return Connection(sock, key=key, is_leader=False, timeout=timeout)


def _check_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise WireError("the other side is not jaxpage")
    if version != VERSION:
        raise WireError(
            f"the other side speaks version {version} of the protocol, this one {VERSION}; "
            "install the same jaxpage on all hosts"
        )


def _mac(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, said, "sha256")


def _tag(key: bytes, number: int, kind: int, body: bytes) -> bytes:
    state = hashlib.blake2b(struct.pack("<QBQ", number, kind, len(body)), key=key, digest_size=16)
    state.update(body)
    return state.digest()


def _read(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises WireError if the connection ends before."""
    buffer = bytearray(size)
    view, num_read = memoryview(buffer), 0
    while num_read < size:
        count = sock.recv_into(view[num_read:])
        if count == 0 and num_read == 0:
            raise WireError("its connection has ended")
        if count == 0:
            raise WireError(f"its connection ended {size - num_read} bytes too early")
        num_read += count
    return bytes(buffer)
