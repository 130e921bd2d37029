"""Chooses the replica for a request: the one that got most of its prefix before, unless its queue is too long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

# A queue is too long if it exceeds the shortest one by half, and by some requests.
_LONGER_BY = 1.5
_LONGER_BY_REQUESTS = 8


class PrefixMemory:
    """Which replica got which prefixes. Keeps the `capacity` most recently used keys."""

    def __init__(self, capacity: int = 2**17):
        self._capacity = capacity
        self._seen_by: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_by)

    def num_seen(self, keys: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """How many of the first keys each replica got before."""
        found = dict.fromkeys(replicas, 0)
        left = set(found)
        for number, key in enumerate(keys, 1):
            left &= self._seen_by.get(key, set())
            if not left:
                break
            found |= dict.fromkeys(left, number)
        return found

    def note(self, keys: Sequence[bytes], replica: str, replicas: Iterable[str]) -> None:
        """Record that a replica gets this prefix. Replicas that are not in `replicas` are forgotten."""
        there = set(replicas)
        for key in keys:
            seen_by = self._seen_by.setdefault(key, set())
            seen_by &= there
            seen_by.add(replica)
            self._seen_by.move_to_end(key)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)


def ranked(keys: Sequence[bytes], queue_lens: Mapping[str, int], memory: PrefixMemory) -> list[str]:
    """Replicas, the best first. `queue_lens`: running and waiting requests of each.

    Ties are broken by the request's first key, so that independent routers agree.
    """
    if not queue_lens:
        return []
    shortest = min(queue_lens.values())
    limit = shortest * _LONGER_BY + _LONGER_BY_REQUESTS
    num_seen = memory.num_seen(keys, queue_lens)
    first = keys[0] if keys else b""

    def order(replica: str) -> tuple[bool, int, int, bytes]:
        queue_len = queue_lens[replica]
        is_crowded = queue_len > limit
        mixed = blake2b(first + replica.encode(), digest_size=8).digest()
        return is_crowded, 0 if is_crowded else -num_seen[replica], queue_len, mixed

    return sorted(queue_lens, key=order)
