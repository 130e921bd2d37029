"""How many decode steps a launch has while new requests may arrive, which must wait for the launches in flight.

Knows how long launches took. Must not know which requests wait.
"""

from __future__ import annotations

from jaxpage.engine.step_output import StepOutput

LONGEST_LAUNCH = 0.05  # seconds; with overlap a new request waits for at most two launches


class LaunchLength:
    """As many decode steps as fit into LONGEST_LAUNCH, at least one and at most `most`."""

    def __init__(self, most: int):
        self._most = most
        self._last_time = 0.0  # when the previous step was collected
        self._step_seconds = 0.0

    def after(self, step: StepOutput) -> int:
        """The number of steps in a launch from now on. Call it with each collected step."""
        # A launch starts only when the previous one is done.
        seconds = step.time - max(step.launch_time, self._last_time)
        self._last_time = step.time
        if step.result is not None and step.result.program.startswith("decode"):
            now = seconds / len(step.result.token_ids)
            # A moving average, so that a pause of the machine is soon forgotten.
            self._step_seconds = (self._step_seconds + now) / 2 if self._step_seconds else now
        if not self._step_seconds:
            return self._most
        return max(1, min(self._most, int(LONGEST_LAUNCH / self._step_seconds)))
