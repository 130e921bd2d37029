"""Where pictures in messages come from: data URLs, files below an allowed folder, allowed hosts of the network.

Everything else is refused, and nothing is read without a limit of bytes and of time. Knows URLs. Must not know what a
picture is.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class MediaSources:
    """What may be read."""

    local_path: str = ""  # files below this folder; "": none
    domains: tuple[str, ...] = ()  # names of hosts
    max_bytes: int = 32 << 20  # of a file
    seconds: float = 10.0  # from the first name that is looked up to the last byte
    max_redirects: int = 3

    def read(self, url: str) -> bytes:
        """The bytes behind a URL. Raises ValueError for what may not be read, cannot be, or has too many bytes."""
        if not isinstance(url, str):
            raise ValueError(f"a URL must be a str, got {type(url).__name__}")
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return self._of_data(url)
        if scheme == "file":
            return self._of_file(url)
        if scheme in _PORTS:
            return self._of_network(url)
        raise ValueError(f"a URL must begin with data:, file:, http: or https:, got {url[:40]!r}")

    def _of_data(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError('a data URL must be "data:image/png;base64,..."')
        self._check(len(body) * 3 // 4 - 2)
        try:
            data = base64.b64decode(unquote(body) if "%" in body else body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"the data URL is no base64: {error}") from None
        self._check(len(data))
        return data

    def _of_file(self, url: str) -> bytes:
        if not self.local_path:
            raise ValueError("file: URLs are not read; start with allowed_local_media_path")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"a file: URL must name a file of this machine, got {url[:80]!r}")
        root = Path(self.local_path).resolve()
        try:
            path = Path(unquote(parts.path)).resolve()  # where links lead to
            if not path.is_relative_to(root):
                raise ValueError(f"{url[:80]!r} is not below allowed_local_media_path")
            if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for its writer
                raise ValueError(f"{url[:80]!r} is no file")
            with path.open("rb") as file:
                data = file.read(self.max_bytes + 1)
        except OSError as error:
            raise ValueError(f"{url[:80]!r} cannot be read: {error.strerror or error}") from None
        self._check(len(data))
        return data

    def _of_network(self, url: str) -> bytes:
        deadline = time.monotonic() + self.seconds
        try:
            for redirects in range(self.max_redirects + 1):
                data, moved_to = self._fetch(url, deadline, is_redirect=redirects > 0)
                if moved_to is None:
                    return data
                url = moved_to
        except (OSError, http.client.HTTPException) as error:
            is_late = time.monotonic() >= deadline  # whatever came of it then
            reason = f"it took more than {self.seconds:g} seconds" if is_late else error
            raise ValueError(f"{url[:80]!r} cannot be fetched: {reason}") from None
        raise ValueError(f"{url[:80]!r} was reached by more than {self.max_redirects} redirects")

    def _fetch(self, url: str, deadline: float, *, is_redirect: bool) -> tuple[bytes, str | None]:
        """The body, or where it has moved to."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme not in _PORTS or host not in [name.lower() for name in self.domains]:
            allowed = ", ".join(self.domains) or "none"
            raise ValueError(f"the host {host!r} is not among allowed_media_domains: {allowed}")
        connection = _connect(parts, host, deadline, only_public=is_redirect)
        # A timeout of the socket is for one read: somebody who sends a byte now and then would never meet it.
        timer = threading.Timer(_left(deadline), _hang_up, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            connection.request(
                "GET", target, headers={"Accept": "image/*", "User-Agent": "jaxpage"}
            )
            with connection.getresponse() as response:
                if response.status in _REDIRECTS:
                    return b"", urljoin(url, response.headers.get("Location") or "")
                if response.status != 200:
                    raise ValueError(f"{url[:80]!r} answers with status {response.status}")
                data = self._body(response)
            _left(deadline)  # what ends because it took too long is not whole
            return data, None
        finally:
            timer.cancel()
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        self._check(response.length or 0)
        data = bytearray()
        while piece := response.read1(_PIECE):
            data += piece
            self._check(len(data))
        return bytes(data)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise ValueError(f"the file has more than the {self.max_bytes} bytes that are read")


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket that is there already: to an address that was looked at."""

    def __init__(self, host: str, port: int, sock: socket.socket):
        super().__init__(host, port)
        self.sock = sock


def _connect(parts: SplitResult, host: str, deadline: float, *, only_public: bool) -> _Connection:
    """To one of the host's addresses. The first URL may lead to any, as its host was allowed by name."""
    port = parts.port or _PORTS[parts.scheme]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = (str(found[0][4][0]), port)
    if only_public and not all(_is_public(str(info[4][0])) for info in found):
        raise ValueError(f"a redirect leads to {host!r}, whose address {address[0]} is not public")
    sock = socket.create_connection(address, timeout=_left(deadline))
    try:
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    connection = _Connection(host, port, sock)
    connection.default_port = _PORTS[parts.scheme]  # which the Host header leaves out
    return connection


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_global


def _left(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("it took too long")
    return seconds


def sources_of(local_path: str | None, domains: Sequence[str]) -> MediaSources:
    """Those of an engine's options `allowed_local_media_path` and `allowed_media_domains`."""
    return MediaSources(local_path=local_path or "", domains=tuple(domains))
