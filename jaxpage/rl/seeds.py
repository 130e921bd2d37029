"""A seed for each request, so that rollouts are reproducible and no two members of a group are the same."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence


class GroupSeeds:
    """Derives a request's seed from a base seed, the weight version, the prompt, and how often the prompt has occurred.

    Members of a group may arrive one by one, from threads in any order: they have the same prompt, so which of them
    gets which seed makes no difference to the set of samples. `seed`: any int, used modulo 2**64. Thread-safe.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._lock = threading.Lock()
        self.version: int | None = None  # of the last seed
        self._num_seen: dict[bytes, int] = {}  # by prompt, at this version

    def next(self, token_ids: Sequence[int], version: int = 0) -> int:
        """The seed, uint32, of the next request with this prompt. A new version restarts the counts."""
        content = struct.pack(f"<Qq{len(token_ids)}i", self.seed % 2**64, version, *token_ids)
        key = hashlib.sha256(content).digest()
        with self._lock:
            if version != self.version:
                self.version, self._num_seen = version, {}
            number = self._num_seen.get(key, 0)
            self._num_seen[key] = number + 1
        digest = hashlib.sha256(key + struct.pack("<q", number)).digest()
        return int.from_bytes(digest[:4], "little")
