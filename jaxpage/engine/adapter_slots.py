"""Which adapter is in which adapter slot of the device, and which sequences must wait for a slot.

Knows adapters by their keys, and slots as numbers. Must not know what an adapter contains, how it gets to the device
(through the plan), or why a sequence runs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jaxpage.plan import StepPlan
from jaxpage.request import Request, Sequence


class AdapterSlots:
    """Slots 1 .. `num_slots`; 0 stands for no adapter.

    An adapter stays in its slot until another one needs it, and is never evicted while a sequence that uses it runs.
    """

    def __init__(self, num_slots: int = 0):
        self.num_slots = num_slots
        self.slots: OrderedDict[str, int] = OrderedDict()  # by key; the least recently used first
        self._free = list(range(num_slots, 0, -1))

    def slot_of(self, request: Request) -> int:
        """The adapter slot of a running request; 0 if it has no adapter."""
        return 0 if request.adapter is None else self.slots[request.adapter.key]

    def claims(self, running: Iterable[Sequence]) -> SlotClaims:
        """The `SlotClaims` of the step that is being planned."""
        adapters = (s.request.adapter for s in running if self.num_slots)
        return SlotClaims(self, Counter(a.key for a in adapters if a is not None))

    def take(self, plan: StepPlan, request: Request, users: Counter[str]) -> None:
        """Load the adapter of a request, unless it is in a slot; may evict an adapter that has no `users`."""
        adapter = request.adapter
        assert adapter is not None
        if adapter.key not in self.slots:
            if not self._free:
                unused = next(key for key in self.slots if not users[key])
                self._free.append(self.slots.pop(unused))
            self.slots[adapter.key] = self._free.pop()
            plan.adapter_loads.append((self.slots[adapter.key], adapter.arrays))
        self.slots.move_to_end(adapter.key)

    def forget_loads(self, plans: Iterable[StepPlan], running: Iterable[Sequence]) -> None:
        """Forget the adapters that these failed plans loaded, whose requests have ended.

        Other `running` sequences use one only if it was loaded: the step ran, and its result made no sense.
        """
        used = {s.request.adapter.key for s in running if s.request.adapter is not None}
        lost = {slot for plan in plans for slot, _ in plan.adapter_loads}
        for key in [key for key, slot in self.slots.items() if slot in lost and key not in used]:
            self._free.append(self.slots.pop(key))


class SlotClaims:
    """Which sequences may start in one step, as far as adapter slots are concerned. Ask in the order of service.

    A sequence without a slot claims that of the adapter with the fewest running sequences: no later sequence of that
    adapter may start. So it waits only for those that already run, and cannot starve.
    """

    def __init__(self, slots: AdapterSlots, users: Counter[str]):
        """`users`: the number of running sequences by adapter key."""
        self._slots, self._users = slots, users
        self._waiting: set[str] = set()
        self._claimed: set[str] = set()

    def may_start(self, request: Request) -> bool:
        """Whether there is a slot for the adapter of a waiting request, which otherwise claims one; True if it has no
        adapter.
        """
        if request.adapter is None:
            return True
        key, users = request.adapter.key, self._users
        if key in self._slots.slots:
            return key not in self._claimed
        if len(users) < self._slots.num_slots:
            return True
        unclaimed = [other for other in users if other not in self._claimed]
        if key not in self._waiting and unclaimed:
            self._claimed.add(min(unclaimed, key=users.__getitem__))
        self._waiting.add(key)
        return False

    def start(self, plan: StepPlan, request: Request) -> None:
        """A request for which `may_start` was True starts to run."""
        if request.adapter is not None:
            self._slots.take(plan, request, self._users)
            self._users[request.adapter.key] += 1
