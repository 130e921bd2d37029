"""How many decode steps a launch has while others may come."""

import numpy as np

from jaxpage.engine.launch_length import LONGEST_LAUNCH, LaunchLength
from jaxpage.engine.step_output import StepOutput
from jaxpage.plan import StepResult


def output(
    time: float, launch_time: float, num_steps: int, program: str = "decode R=8"
) -> StepOutput:
    shape = (num_steps, 1)
    result = StepResult(
        token_ids=np.zeros(shape, np.int32),
        num_sampled=np.full(1, num_steps, np.int32),
        logprobs=np.zeros(shape, np.float32),
        ranks=np.zeros(shape, np.int32),
        top_token_ids=np.zeros((*shape, 0), np.int32),
        top_logprobs=np.zeros((*shape, 0), np.float32),
        program=program,
    )
    return StepOutput(time=time, launch_time=launch_time, result=result)


def test_slow_steps_are_launched_one_by_one_and_quick_ones_together():
    length, now = LaunchLength(8), 0.0
    assert length.after(StepOutput()) == 8
    for _ in range(10):  # launched while the one before it runs
        steps = length.after(output(now := now + 2 * LONGEST_LAUNCH, now - LONGEST_LAUNCH, 1))
    assert steps == 1
    for _ in range(10):
        steps = length.after(output(now := now + LONGEST_LAUNCH / 4, now - 1.0, 1))
    assert steps == 4 - 1 or steps == 4
    for _ in range(10):
        steps = length.after(output(now := now + LONGEST_LAUNCH / 100, now - 1.0, 4))
    assert steps == 8


def test_prompts_and_pauses_say_nothing_of_decode_steps():
    length = LaunchLength(8)
    assert length.after(output(0.001, 0.0, 8)) == 8
    assert length.after(output(5.0, 0.001, 1, "forward T=2048")) == 8
    assert length.after(output(99.001, 99.0, 8)) == 8  # nobody asked for anything for a while
