"""The padded sizes for which programs are compiled, and which of them a plan uses.

A decode step is one program. Any other step is two: `forward`, sized by tokens, and `sample`, sized by rows, so the
numbers of token sizes and row sizes add up instead of multiplying. A step of late rows only is just `sample`. In steps
with drafts `verify`, which has the same sizes, takes the place of `sample`; and `draft`, with these sizes too, comes
first if a draft model makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpage.plan import StepPlan

MAX_PROGRAMS = (
    24  # of steps, without two each of `verify` and `draft`; the others are in `runner.calls`
)
SMALLEST_ROWS = 2  # XLA's fast bf16 matmul on CPU needs two rows; elsewhere this costs nothing
FEW_ROWS = 8  # a single prompt should not pay for the LM head of max_num_seqs rows
FEW_TOKENS = 16  # smaller steps cost about the same, the time to read the weights
MANY_TOKENS = 256  # a usual prompt; the first request waits only for programs of this size


@dataclass(frozen=True, order=True)
class Bucket:
    """T packed tokens and R rows. In a decode bucket each row has one token, and a launch may repeat the step."""

    num_tokens: int
    num_rows: int
    decode: bool

    @property
    def name(self) -> str:
        return f"decode R={self.num_rows}" if self.decode else f"forward T={self.num_tokens}"

    def programs(self, num_rows: int) -> tuple[str, ...]:
        """The programs that a plan of `num_rows` rows runs, in order."""
        return (self.name,) if self.decode else (self.name, sample_name(self.sample_rows(num_rows)))

    def sample_rows(self, num_rows: int) -> int:
        """The size of the `sample` program for `num_rows` rows."""
        return min(FEW_ROWS, self.num_rows) if num_rows <= FEW_ROWS else self.num_rows


def sample_name(num_rows: int) -> str:
    return f"sample R={num_rows}"


def verify_name(num_rows: int) -> str:
    return f"verify R={num_rows}"


def draft_name(num_rows: int) -> str:
    return f"draft R={num_rows}"


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of a configuration, smallest first: rows of decode steps and tokens of other steps in powers of two.

    There is none between FEW_TOKENS and 4 * FEW_TOKENS: every program costs seconds of start-up, while padding 17 to 32
    tokens to 64 makes their matmuls only half as expensive again. If there are too many buckets, the smallest token
    sizes are dropped first: on a device that takes large batches they save no time.
    """
    most_rows = max(SMALLEST_ROWS, _power_of_two(max_num_seqs))
    most_tokens = max(FEW_ROWS, _power_of_two(max_num_batched_tokens))
    decode = [Bucket(rows, rows, True) for rows in _powers(SMALLEST_ROWS, most_rows)]
    sizes = _powers(min(FEW_TOKENS, most_tokens), most_tokens)
    if len(sizes) > 2:
        sizes.remove(2 * FEW_TOKENS)
    num_sizes = MAX_PROGRAMS - len(decode) - 2  # two of `sample`
    return (*decode, *(Bucket(tokens, most_rows, False) for tokens in sizes[-num_sizes:]))


@dataclass(frozen=True)
class StepPrograms:
    """The programs of a plan: the bucket of its tokens, if it has any, and `sample` or `verify`, if it needs one; and
    `draft`, if the draft model makes drafts for it.
    """

    bucket: Bucket | None
    sample: str | None
    draft: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.bucket and self.bucket.name, self.sample, self.draft)
        return tuple(name for name in names if name)

    def fill(self, plan: StepPlan) -> float:
        """The share of the bucket's tokens that are not padding; 0 without a bucket."""
        return plan.total_tokens / self.bucket.num_tokens if self.bucket else 0.0


def fitting_programs(buckets: Sequence[Bucket], plan: StepPlan) -> list[StepPrograms]:
    """Every choice of programs that fits the plan, smallest first."""
    rows = buckets[-1].sample_rows(plan.num_rows)
    if plan.total_tokens == 0:  # all rows are late
        return [StepPrograms(None, sample_name(rows))]
    sample = verify_name(rows) if plan.num_drafts else sample_name(rows)
    draft = draft_name(rows) if plan.runs_draft_model else None
    fitting = fitting_buckets(buckets, plan)
    return [StepPrograms(b, None if b.decode else sample, draft) for b in fitting]


def fitting_buckets(buckets: Sequence[Bucket], plan: StepPlan) -> list[Bucket]:
    """The buckets that hold the plan's tokens, smallest first. Raises ValueError if none does (a bug in the scheduler's
    limits). Rows that sample later, or need logprobs of the whole vocabulary, require the hidden states that `forward`
    keeps; and only `forward` takes embeddings.
    """
    tokens, rows = plan.total_tokens, plan.num_rows
    embeds = plan.input_embeds or plan.picture_tokens or plan.positions
    at_once = all(plan.samples) and not plan.vocabulary_rows and not embeds
    decode = tokens == rows and max(plan.num_tokens) == 1 and at_once
    fitting = [
        bucket
        for bucket in buckets
        if bucket.decode == decode and bucket.num_tokens >= tokens and bucket.num_rows >= rows
    ]
    if not fitting:
        raise ValueError(
            f"no compiled step holds {tokens} tokens in {rows} rows; largest: {max(buckets)}"
        )
    return sorted(fitting)


def start_order(buckets: Sequence[Bucket]) -> tuple[list[str], list[str]]:
    """(first, then): the programs that a usual prompt needs, and all others in the order in which they are compiled.

    `then` begins with a decode step of few rows and the largest program of each kind, which can run any plan.
    """
    decode = [bucket for bucket in buckets if bucket.decode]
    forward = [bucket for bucket in buckets if not bucket.decode]
    usual = min((b for b in forward if b.num_tokens >= MANY_TOKENS), default=forward[-1])
    few = min((b for b in decode if b.num_rows >= FEW_ROWS), default=decode[-1])
    soon = [few.name, decode[-1].name, *forward[-1].programs(forward[-1].num_rows)]
    first = usual.programs(1)
    then = [*soon, *(bucket.name for bucket in buckets)]
    return list(first), [name for name in dict.fromkeys(then) if name not in first]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _powers(first: int, last: int) -> list[int]:
    return [1 << exponent for exponent in range(first.bit_length() - 1, last.bit_length())]
