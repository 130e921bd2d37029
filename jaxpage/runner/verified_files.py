"""Files that are written atomically, and end with a checksum of their name and content."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

CHECKSUM_LEN = 32  # bytes


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, and its folder if that is missing, readable only by this user. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise


class VerifiedFiles:
    """Reads and writes files of one `format`, whose version is part of each checksum.

    Neither raises: a file that cannot be read is treated as absent, and one that cannot be written (disk full) is
    skipped. The first problem of each kind is logged.
    """

    def __init__(self, format: bytes):
        self._format = format
        self._reported: set[str] = set()

    def write(self, path: Path, payload: bytes) -> None:
        try:
            write_atomically(path, payload + self._checksum(path, payload))
        except OSError as error:
            self.warn("write", f"{path} was not written: {error}")

    def read(self, path: Path) -> bytes | None:
        """The payload; None if the file is absent or damaged. A damaged file is removed, if this user may."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        payload = self._payload(path, data)
        if payload is None:
            self.warn("read", f"{path} is damaged ({len(data)} bytes) and is removed")
            with contextlib.suppress(OSError):
                path.unlink()
        return payload

    def is_whole(self, path: Path) -> bool:
        return self._payload(path, path.read_bytes()) is not None

    def warn(self, kind: str, message: str) -> None:
        """Log only the first message of each kind."""
        if kind not in self._reported:
            logger.warning("%s; further ones are not reported", message)
            self._reported.add(kind)

    def _payload(self, path: Path, data: bytes) -> bytes | None:
        payload, checksum = data[:-CHECKSUM_LEN], data[-CHECKSUM_LEN:]
        return payload if checksum == self._checksum(path, payload) else None

    def _checksum(self, path: Path, payload: bytes) -> bytes:
        return hashlib.sha256(self._format + path.stem.encode() + payload).digest()
