"""KV blocks on disk: found again by their hash, by this process or a later one.

Knows files. Must not know what a block means. A file is read only if it is whole and was written for the same model,
weights and layout: the folder's name is their fingerprint, and each file ends with a checksum over name and content.
Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

FORMAT = b"jaxpage kv block 2"
CHECKSUM_LEN = 32  # bytes


def fingerprint(facts: Iterable[str], arrays: Iterable[np.ndarray]) -> str:
    """Of everything that shapes KV: `facts` of model and layout, and the bytes of all parameters. 32 hex digits."""
    state = hashlib.sha256(FORMAT)
    for fact in facts:
        state.update(repr(fact).encode())
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()[:32]


class BlockStore:
    """Blocks in `folder`, each an array of every one of `shapes` and `dtypes`.

    Reading and writing never raise: a block that cannot be read is not there, one that cannot be written (disk full)
    is left out, and the log says so once.
    """

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]):
        """Raises OSError if the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shapes, self._dtypes = list(shapes), [np.dtype(dtype) for dtype in dtypes]
        self._sizes = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        self._complained = False

    def save(self, block_hash: bytes, content: Sequence[np.ndarray]) -> None:
        """Write a block unless it is there. It appears whole or not at all."""
        path = self._path(block_hash)
        if path.exists():
            return
        payload = b"".join(np.ascontiguousarray(part).tobytes() for part in content)
        temporary = None
        try:
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                temporary = file.name
                file.write(payload + _checksum(block_hash, payload))
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            self._complain(f"a KV block was not written to {path}: {error}")

    def load(self, block_hash: bytes) -> list[np.ndarray] | None:
        """The block's arrays; None if it is not there, torn or foreign. A damaged file is removed."""
        path = self._path(block_hash)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        payload, checksum = data[:-CHECKSUM_LEN], data[-CHECKSUM_LEN:]
        if len(payload) != sum(self._sizes) or checksum != _checksum(block_hash, payload):
            self._complain(f"{path} is damaged ({len(data)} bytes) and is not used")
            path.unlink(missing_ok=True)
            return None
        parts, start = [], 0
        for shape, dtype, size in zip(self._shapes, self._dtypes, self._sizes, strict=True):
            parts.append(np.frombuffer(payload[start : start + size], dtype).reshape(shape))
            start += size
        return parts

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / name

    def _complain(self, message: str) -> None:
        if not self._complained:
            logger.warning("%s; further ones are not reported", message)
            self._complained = True


def _checksum(block_hash: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(FORMAT + block_hash + payload).digest()
