"""How much the device is given at once, and how early, while requests may come: a new one waits for what was launched.

Knows what launches took. Must not know who waits.
"""

from __future__ import annotations

from jaxpage.plan import StepPlan

LONGEST_LAUNCH = 0.05  # seconds of decode steps
SLOWDOWN = 1.25  # what one launch may add to what is expected of the next: pauses of the machine are no news
# How long before its expected end a launch is followed by the next one: a share of its time, seconds, or so many times
# what the host needs. With once, a host that is late would not be told from a slow device, and would stay late.
SHARE_BEFORE, LEAST_BEFORE, HOST_TIMES = 0.2, 0.005, 2.0
HOST_DECAY = 0.8  # of what the host took, if it takes less

_Kind = tuple[bool, int]


class Pace:
    """Of one engine whose launches run one after another."""

    def __init__(self, most_steps: int):
        """`most_steps`: decode steps that a launch may have."""
        self._most_steps = most_steps
        self._step_seconds: dict[_Kind, float] = {}  # expected of a step, by its kind
        self._decode: _Kind | None = None  # of the last decode step
        self._free_at = 0.0  # when the device was done with what was collected
        # Since when the host prepares a launch behind another, and how long it takes for that.
        self._woke_at: float | None = None
        self._host_seconds = 0.0

    def collected(self, plan: StepPlan, launch_time: float, now: float) -> None:
        """A step was launched at a time, and collected now; seconds, monotonic."""
        seconds = (now - max(launch_time, self._free_at)) / plan.num_steps
        self._free_at, self._woke_at = now, None
        kind = _kind(plan)
        if kind[0]:
            self._decode = kind
        expected = self._step_seconds.get(kind, seconds)
        self._step_seconds[kind] = min(seconds, SLOWDOWN * expected)

    @property
    def num_steps(self) -> int:
        """Decode steps of a launch: as many as take LONGEST_LAUNCH, at least one."""
        seconds = self._step_seconds[self._decode] if self._decode is not None else 0.0
        return max(1, min(self._most_steps, int(LONGEST_LAUNCH / max(seconds, 1e-6))))

    def next_launch(self, plan: StepPlan, launch_time: float) -> float:
        """When to follow the one step that is under way; seconds, monotonic. A time that is past: now.

        What is launched earlier than that waits for the device, and those who come meanwhile wait behind it.
        """
        seconds = plan.num_steps * self._step_seconds.get(_kind(plan), 0.0)
        end = max(launch_time, self._free_at) + seconds
        return end - max(SHARE_BEFORE * seconds, LEAST_BEFORE, HOST_TIMES * self._host_seconds)

    def woke(self, now: float) -> None:
        """The host begins to prepare a launch while another is under way."""
        self._woke_at = now

    def launched(self, now: float) -> None:
        """It is done with that."""
        if self._woke_at is not None:
            self._host_seconds = max(now - self._woke_at, HOST_DECAY * self._host_seconds)


def _kind(plan: StepPlan) -> _Kind:
    """Steps of a kind take about as long: their programs are for powers of two of rows, or of tokens."""
    decodes = not plan.admissions and max(plan.num_tokens, default=0) == 1
    return decodes, (max(plan.total_tokens, 1) - 1).bit_length()
