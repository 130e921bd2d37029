"""Which adapter is in which of the device's adapter slots, and who has to wait for one.

What this file knows: adapters by their keys, slots as numbers. What it must never learn: what an adapter holds, how it
gets to the device (the plan says so), why a sequence runs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jaxpage.plan import StepPlan
from jaxpage.request import Request, Sequence


class AdapterSlots:
    """Slots 1 .. `num_slots`; 0 stands for no adapter.

    An adapter stays in its slot until another needs it, and never leaves while a sequence that has it runs.
    """

    def __init__(self, num_slots: int = 0):
        self.num_slots = num_slots
        self.slots: OrderedDict[str, int] = OrderedDict()  # by key; the least recently used first
        self._free = list(range(num_slots, 0, -1))

    def slot_of(self, request: Request) -> int:
        """The slot of a request that runs."""
        return 0 if request.adapter is None else self.slots[request.adapter.key]

    def entrance(self, running: Iterable[Sequence]) -> Entrance:
        """Who may begin to run in the step that is planned now."""
        adapters = (s.request.adapter for s in running if self.num_slots)
        return Entrance(self, Counter(a.key for a in adapters if a is not None))

    def take(self, plan: StepPlan, request: Request, users: Counter[str]) -> None:
        """Have the adapter of a request in a slot: if it is in none yet, in one of which there are no `users`."""
        adapter = request.adapter
        assert adapter is not None
        if adapter.key not in self.slots:
            if not self._free:
                unused = next(key for key in self.slots if not users[key])
                self._free.append(self.slots.pop(unused))
            self.slots[adapter.key] = self._free.pop()
            plan.adapter_loads.append((self.slots[adapter.key], adapter.arrays))
        self.slots.move_to_end(adapter.key)

    def forget_loads(self, plans: Iterable[StepPlan]) -> None:
        """What these plans were to load is perhaps not there. The requests of these plans have ended."""
        lost = {slot for plan in plans for slot, _ in plan.adapter_loads}
        for key in [key for key, slot in self.slots.items() if slot in lost]:
            self._free.append(self.slots.pop(key))


class Entrance:
    """Who may begin to run in one step, as far as slots for adapters go. Ask in the order of service.

    A sequence that finds no slot lays claim to that of the adapter which fewest sequences have: no further ones of that
    adapter begin to run behind it. So it waits for those that run now, and not for as long as others come.
    """

    def __init__(self, slots: AdapterSlots, users: Counter[str]):
        """`users`: how many sequences run, by the keys of their adapters."""
        self._slots, self._users = slots, users
        self._waiting: set[str] = set()
        self._claimed: set[str] = set()

    def is_open(self, request: Request) -> bool:
        """Whether there is a slot for the adapter of a waiting request, if it has one."""
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

    def enter(self, plan: StepPlan, request: Request) -> None:
        """A request to which the entrance is open begins to run."""
        if request.adapter is not None:
            self._slots.take(plan, request, self._users)
            self._users[request.adapter.key] += 1
