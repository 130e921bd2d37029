"""Which replica answers a request: the one with most of its prompt cached, unless its load is clearly higher.

Pure bookkeeping: it remembers where prompts were sent, block by block, and does not look into any pool. Blocks that it
assumes to be cached may have been evicted, which only costs time. Must not know engines or threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxpage.engine.block_hashes import extend_hashes
from jaxpage.request import Request
from jaxpage.request import Sequence as TokenSequence

# Load is counted in prompt tokens still to be computed. An unfinished sequence counts as this many of them.
SEQUENCE_LOAD = 256
# The load of a replica is clearly higher if the difference exceeds both this and half of the other replica's load.
_MOST_EXTRA_LOAD = 8 * SEQUENCE_LOAD


class Router:
    """Chooses replicas by number, and keeps track of their loads. Not thread-safe."""

    def __init__(self, num_replicas: int, *, block_size: int, max_blocks: int):
        """`block_size` of the prefix cache in tokens; 0: there is none. `max_blocks`: how many hashes to remember."""
        self._block_size = block_size
        self._max_blocks = max_blocks
        # Block hash -> a bit for each replica that got a prompt with it; the least recently used first.
        self._owners: OrderedDict[bytes, int] = OrderedDict()
        self._loads = [0] * num_replicas
        self._requests: dict[str, _Load] = {}
        self._next = 0  # breaks ties between replicas

    def choose(self, request: Request, among: Sequence[int]) -> int:
        """Choose one of the replicas `among`, and add the request to its load."""
        hashes = self._prompt_hashes(request)
        reads_cache = not request.params.skip_reading_prefix_cache
        num_cached, best = self._longest_prefix(hashes if reads_cache else [], among)
        loads = self._loads
        chosen = self._least_loaded(best)
        least = self._least_loaded(among)
        if loads[chosen] > loads[least] + max(_MOST_EXTRA_LOAD, loads[least] // 2):
            chosen, num_cached = least, 0
        self._next = (chosen + 1) % len(loads)
        self._remember(hashes, chosen)
        num_new = max(1, len(request.prompt_token_ids) - num_cached * self._block_size)
        width = request.params.n if request.beams is None else request.beams.width
        load = _Load(chosen, width * SEQUENCE_LOAD, num_new)
        self._requests[request.request_id] = load
        loads[chosen] += load.sequences + load.prompt
        return chosen

    def answered(self, request_id: str) -> None:
        """The prompt of a request has been computed. Unknown requests and further calls are ignored."""
        load = self._requests.get(request_id)
        if load is not None:
            self._loads[load.replica] -= load.prompt
            load.prompt = 0

    def ended(self, request_id: str) -> None:
        """A request no longer adds to the load of its replica. Unknown requests are ignored."""
        load = self._requests.pop(request_id, None)
        if load is not None:
            self._loads[load.replica] -= load.sequences + load.prompt

    def forget_prefixes(self) -> None:
        """All prefix caches have been emptied."""
        self._owners.clear()

    def load(self, replica: int) -> int:
        """The load of a replica, in tokens."""
        return self._loads[replica]

    def _prompt_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the full blocks of its prompt."""
        if not self._block_size:
            return []
        tokens = request.prompt_token_ids
        prompt = TokenSequence(request=request, index=0, token_ids=tokens, max_len=len(tokens))
        extend_hashes(prompt, len(tokens) // self._block_size, self._block_size, 0)
        return prompt.block_hashes

    def _longest_prefix(
        self, hashes: Sequence[bytes], among: Sequence[int]
    ) -> tuple[int, list[int]]:
        """(number of blocks in the longest known prefix, replicas that have it)."""
        best = sum(1 << replica for replica in among)
        count = 0
        for block_hash in hashes:
            owners = best & self._owners.get(block_hash, 0)
            if not owners:
                break
            best, count = owners, count + 1
        return count, [replica for replica in range(len(self._loads)) if best >> replica & 1]

    def _least_loaded(self, among: Sequence[int]) -> int:
        """The replica with the lowest load; ties are resolved round-robin."""
        size = len(self._loads)
        return min(among, key=lambda replica: (self._loads[replica], (replica - self._next) % size))

    def _remember(self, hashes: Sequence[bytes], replica: int) -> None:
        owners = self._owners
        # Last block first, so that the first blocks of prompts, which are found more often, are forgotten last.
        for block_hash in reversed(hashes):
            owners[block_hash] = owners.pop(block_hash, 0) | 1 << replica
        while len(owners) > self._max_blocks:
            owners.popitem(last=False)


class _Load:
    """What a request adds to the load of its replica."""

    __slots__ = ("replica", "sequences", "prompt")

    def __init__(self, replica: int, sequences: int, prompt: int):
        self.replica, self.sequences, self.prompt = replica, sequences, prompt
