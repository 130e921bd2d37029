"""KV blocks on disk, found by their hash by this process or a later one.

The folder's name is a fingerprint of model, weights and layout. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxpage.runner.verified_files import VerifiedFiles

FORMAT = b"jaxpage kv block 4"


def fingerprint(facts: Iterable[str], arrays: Iterable[np.ndarray]) -> str:
    """32 hex digits that identify everything which determines KV: `facts` of model and layout, and all parameters."""
    state = hashlib.sha256(FORMAT)
    for fact in facts:
        state.update(repr(fact).encode())
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()[:32]


class BlockStore:
    """Blocks in `folder`; each has one array for each of `shapes` and `dtypes`. Reading and writing never raise."""

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]):
        """Raises OSError if the folder cannot be created."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._files = folder, VerifiedFiles(FORMAT)
        self._parts = list(zip(shapes, map(np.dtype, dtypes), strict=True))

    def save(self, block_hash: bytes, content: Sequence[np.ndarray]) -> None:
        """Write a block unless it exists."""
        path = self._path(block_hash)
        if not os.path.exists(path):  # `path.exists` would raise for a folder of another user
            payload = b"".join(np.ascontiguousarray(part).tobytes() for part in content)
            self._files.write(path, payload)

    def load(self, block_hash: bytes) -> list[np.ndarray] | None:
        """The block's arrays; None if it is absent, damaged or of another size."""
        payload = self._files.read(self._path(block_hash))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._parts]
        if payload is None or len(payload) != sum(sizes):
            return None
        parts, start = [], 0
        for (shape, dtype), size in zip(self._parts, sizes, strict=True):
            parts.append(np.frombuffer(payload[start : start + size], dtype).reshape(shape))
            start += size
        return parts

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / name
