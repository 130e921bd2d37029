"""The padded sizes for which steps are compiled, and which of them a plan takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpage.plan import StepPlan

MAX_PROGRAMS = 24  # with the admission program: 25 for any configuration
SMALLEST_ROWS = 2  # XLA's fast bf16 matmul on CPU wants two rows; elsewhere it costs nothing
FEW_ROWS = 8  # a prompt alone should not pay for the LM head of max_num_seqs rows
FEW_TOKENS = 16  # smaller steps cost about the same: reading the weights
MANY_TOKENS = 256  # beyond this the LM head is a small part of a step, and one row bucket is enough


@dataclass(frozen=True, order=True)
class Bucket:
    """T packed tokens and R rows. In a decode bucket token r is row r's only one, and steps may repeat."""

    num_tokens: int
    num_rows: int
    decode: bool

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode R={self.num_rows}"
        return f"step T={self.num_tokens} R={self.num_rows}"


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """All buckets of a configuration, smallest first: tokens and rows in powers of two, at most MAX_PROGRAMS.

    There is none between FEW_TOKENS and 4 * FEW_TOKENS: every program costs seconds of start-up, and the products of
    17 to 32 tokens, padded to 64, half as much again.
    When there are too many, the smallest token sizes go first: a device that takes large batches spends the same
    time on few tokens as on some more.
    """
    most_rows = max(SMALLEST_ROWS, _power_of_two(max_num_seqs))
    most_tokens = max(FEW_ROWS, _power_of_two(max_num_batched_tokens))
    decode = [Bucket(rows, rows, True) for rows in _powers(SMALLEST_ROWS, most_rows)]
    few = min(FEW_ROWS, most_rows)
    mixed = set()
    for tokens in _powers(min(FEW_TOKENS, most_tokens), most_tokens):
        if tokens == 2 * FEW_TOKENS < most_tokens:
            continue
        if tokens <= MANY_TOKENS:
            mixed.add(Bucket(tokens, few, False))
        # Rows without tokens (forks) may outnumber the tokens: the largest bucket takes any plan.
        rows = most_rows if tokens == most_tokens else min(tokens, most_rows)
        mixed.add(Bucket(tokens, rows, False))
    kept = sorted(mixed)
    while len(kept) + len(decode) > MAX_PROGRAMS and kept[0].num_tokens < most_tokens:
        smallest = kept[0].num_tokens
        kept = [bucket for bucket in kept if bucket.num_tokens > smallest]
    return (*decode, *kept)


def choose_bucket(buckets: Sequence[Bucket], plan: StepPlan) -> Bucket:
    """The smallest bucket that holds the plan. Raises ValueError if none does (a bug in the scheduler's limits)."""
    tokens, rows = plan.total_tokens, plan.num_rows
    decode = tokens == rows and max(plan.num_tokens) == 1
    fitting = [
        bucket
        for bucket in buckets
        if bucket.decode == decode and bucket.num_tokens >= tokens and bucket.num_rows >= rows
    ]
    if not fitting:
        raise ValueError(
            f"no compiled step holds {tokens} tokens in {rows} rows; largest: {max(buckets)}"
        )
    return min(fitting)


def first_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets to compile before the first request: any plan fits one of them, and a usual one not badly.

    The largest of each kind, a decode step of few rows, and a prompt of up to MANY_TOKENS.
    """
    largest = [max(bucket for bucket in buckets if bucket.decode is kind) for kind in (False, True)]
    usual = (Bucket(FEW_ROWS, FEW_ROWS, True), Bucket(MANY_TOKENS, FEW_ROWS, False))
    return list(dict.fromkeys([*largest, *(bucket for bucket in usual if bucket in buckets)]))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _powers(first: int, last: int) -> list[int]:
    return [1 << exponent for exponent in range(first.bit_length() - 1, last.bit_length())]
