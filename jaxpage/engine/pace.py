"""How much to launch at once, and how early, while requests may arrive: a new request waits for all that was launched.

Knows how long launches took. Must not know which requests wait.
"""

from __future__ import annotations

from jaxpage.plan import StepPlan

LONGEST_LAUNCH = 0.05  # seconds of decode steps
# How much a slower launch may raise the estimate, so that one slow launch, such as a pause of the machine, hardly
# changes it.
SLOWDOWN = 1.25
# How long before the expected end of the last launch the next one is due: the longest of a share of the last one's
# time, a number of seconds, and a multiple of the time that the host needs to prepare a launch. With a multiple of 1, a
# host that is late would look like a slow device, and would stay late.
SHARE_BEFORE, LEAST_BEFORE, HOST_TIMES = 0.2, 0.005, 2.0
# After a quicker preparation, the estimate of the host's time falls to no less than this share of it.
HOST_DECAY = 0.8

_Kind = tuple[bool, int]


class Pace:
    """Measures the launches of one engine, and decides how many decode steps to launch and when."""

    def __init__(self, most_steps: int):
        """`most_steps`: the most decode steps that one launch may have."""
        self._most_steps = most_steps
        self._step_seconds: dict[_Kind, float] = {}  # expected seconds of a step, by its kind
        self._decode: _Kind | None = None  # the kind of the last decode step
        self._free_at = 0.0  # when the last collected step ended
        # When the host began to prepare a launch behind another one, and how long it is expected to take.
        self._preparing_since: float | None = None
        self._host_seconds = 0.0

    def collected(self, plan: StepPlan, launch_time: float, now: float) -> None:
        """A step was launched at `launch_time` and is collected now. All times are in seconds, monotonic."""
        seconds = (now - max(launch_time, self._free_at)) / plan.num_steps
        self._free_at, self._preparing_since = now, None
        kind = _kind(plan)
        if kind[0]:
            self._decode = kind
        expected = self._step_seconds.get(kind, seconds)
        self._step_seconds[kind] = min(seconds, SLOWDOWN * expected)

    @property
    def num_steps(self) -> int:
        """Decode steps of the next launch: as many as take LONGEST_LAUNCH, at least one."""
        seconds = self._step_seconds[self._decode] if self._decode is not None else 0.0
        return max(1, min(self._most_steps, int(LONGEST_LAUNCH / max(seconds, 1e-6))))

    def next_launch(self, plan: StepPlan, launch_time: float) -> float:
        """When to launch the step after the one in flight. A time in the past means now.

        A step that is launched earlier waits for the device, and requests that arrive meanwhile wait behind it.
        """
        seconds = plan.num_steps * self._step_seconds.get(_kind(plan), 0.0)
        end = max(launch_time, self._free_at) + seconds
        return end - max(SHARE_BEFORE * seconds, LEAST_BEFORE, HOST_TIMES * self._host_seconds)

    def began_to_prepare(self, now: float) -> None:
        """The host begins to prepare a step while another one is in flight."""
        self._preparing_since = now

    def launched(self, now: float) -> None:
        """The host has launched that step."""
        if self._preparing_since is not None:
            seconds = now - self._preparing_since
            self._host_seconds = max(seconds, HOST_DECAY * self._host_seconds)


def _kind(plan: StepPlan) -> _Kind:
    """Steps of the same kind take about as long: their programs are for powers of two of rows, or of tokens."""
    decodes = not plan.admissions and max(plan.num_tokens, default=0) == 1
    return decodes, (max(plan.total_tokens, 1) - 1).bit_length()
