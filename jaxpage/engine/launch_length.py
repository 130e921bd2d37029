"""How many decode steps a launch has while others may come: a new request waits for the launches under way.

Knows what launches took. Must not know who waits.
"""

from __future__ import annotations

from jaxpage.engine.step_output import StepOutput

LONGEST_LAUNCH = 0.05  # seconds; with overlap a request that comes waits for two launches at most


class LaunchLength:
    """As many decode steps as take LONGEST_LAUNCH, at least one and at most `most`."""

    def __init__(self, most: int):
        self._most = most
        self._last_time = 0.0  # when the step before was collected
        self._step_seconds = 0.0

    def after(self, step: StepOutput) -> int:
        """The steps of a launch from now on, after another one was collected."""
        # A launch waits for the one before it.
        seconds = step.time - max(step.launch_time, self._last_time)
        self._last_time = step.time
        if step.result is not None and step.result.program.startswith("decode"):
            now = seconds / len(step.result.token_ids)
            # Half of what was known, so that a pause of the machine is forgotten soon.
            self._step_seconds = (self._step_seconds + now) / 2 if self._step_seconds else now
        if not self._step_seconds:
            return self._most
        return max(1, min(self._most, int(LONGEST_LAUNCH / self._step_seconds)))
