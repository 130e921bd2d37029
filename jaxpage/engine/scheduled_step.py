"""A step as the scheduler builds it: the plan, and beside it the sequences whose rows it has.

The plan is values and goes to the runner. The sequences stay here, for `update`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpage.plan import Admission, StepPlan
from jaxpage.request import Sequence


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """`sequences[i]` is the one of the plan's row i."""

    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # all their data goes up

    def add_row(self, sequence: Sequence, start: int, count: int, samples: bool) -> None:
        """A row that computes `count` tokens from `start`."""
        plan = self.plan
        self.sequences.append(sequence)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.num_tokens.append(count)
        plan.samples.append(samples)

    def close(self) -> None:
        """Write down what the plan says of the admitted sequences; they do not change any more."""
        self.plan.admissions = [_admission(sequence) for sequence in self.admitted]


def _admission(sequence: Sequence) -> Admission:
    request = sequence.request
    return Admission(
        slot=sequence.slot,
        sequence_index=sequence.index,
        token_ids=list(sequence.token_ids),
        block_tables=[list(table) for table in sequence.block_tables],
        prompt_len=len(request.prompt_token_ids),
        max_len=sequence.max_len,
        fields=request.slot_fields,
    )
