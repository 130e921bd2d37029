"""The router of requests to replicas for Ray Serve, using `choice.ranked`.

Ray copies this module to the routing processes, so its logic is elsewhere.
"""

from __future__ import annotations

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from jaxpage.ray_serve.call import Call
from jaxpage.ray_serve.choice import PrefixMemory, ranked


class PrefixRouter(RequestRouter):
    """Sends a `Call` to a replica that knows its prefix; other requests to the shortest queue."""

    def initialize_state(self, **kwargs: object) -> None:
        """See `RequestRouter`."""
        self._memory = PrefixMemory()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`: the best replica, the second best, and so on."""
        args = pending_request.args if pending_request is not None else ()
        call = next((arg for arg in args if isinstance(arg, Call)), None)
        prefix, avoid = (call.prefix, call.avoid) if call is not None else ((), frozenset())
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = {name: replica for name, replica in there.items() if name not in avoid} or there
        # If the length of a queue is unknown, Ray asks the replica before it sends anything.
        queue_lens = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in wanted.items()
        }
        names = ranked(prefix, queue_lens, self._memory)
        if names:
            self._memory.note(prefix, names[0], there)
        return [[wanted[name]] for name in names]
