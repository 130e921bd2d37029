import itertools

import pytest

from jaxpage.plan import StepPlan
from jaxpage.runner.buckets import (
    MAX_PROGRAMS,
    Bucket,
    choose_bucket,
    first_buckets,
    make_buckets,
)


def plan(num_tokens):
    return StepPlan(sequences=[None] * len(num_tokens), num_tokens=list(num_tokens))


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 100, 256, 1024, 4096])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64, 512, 2048, 4096, 16384])
def test_any_configuration_needs_few_programs_and_holds_every_plan(
    max_num_seqs, max_num_batched_tokens
):
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert len(buckets) == len(set(buckets)) <= MAX_PROGRAMS
    some = {1, 2, 7, max_num_batched_tokens // 3 + 1, max_num_batched_tokens}
    for rows, tokens in itertools.product((1, 2, max_num_seqs // 2 + 1, max_num_seqs), some):
        if rows <= max_num_seqs and tokens <= max_num_batched_tokens:
            mixed = plan([tokens] + [0] * (rows - 1))  # one prompt and its forks
            bucket = choose_bucket(buckets, mixed)
            assert bucket.num_tokens >= tokens and bucket.num_rows >= rows
        if rows <= min(max_num_seqs, max_num_batched_tokens):
            assert choose_bucket(buckets, plan([1] * rows)).decode


def test_default_cpu_configuration():
    buckets = make_buckets(max_num_seqs=256, max_num_batched_tokens=2048)
    assert len(buckets) == 19
    assert choose_bucket(buckets, plan([1] * 5)) == Bucket(8, 8, True)
    assert choose_bucket(buckets, plan([20])) == Bucket(64, 8, False)
    assert choose_bucket(buckets, plan([1] * 30 + [50])) == Bucket(128, 128, False)
    assert choose_bucket(buckets, plan([1, 0, 0])) == Bucket(
        16, 8, False
    )  # a one-token prompt, n = 3


def test_a_plan_beyond_every_bucket_is_refused_with_numbers():
    buckets = make_buckets(max_num_seqs=4, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="17 tokens in 1 rows"):
        choose_bucket(buckets, plan([17]))


@pytest.mark.parametrize("max_num_seqs", [1, 8, 256, 1024])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 512, 4096, 16384])
def test_the_first_buckets_hold_every_plan(max_num_seqs, max_num_batched_tokens):
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    first = first_buckets(buckets)
    assert set(first) <= set(buckets) and len(first) <= 4
    choose_bucket(first, plan([max_num_batched_tokens] + [0] * (max_num_seqs - 1)))
    choose_bucket(first, plan([1] * min(max_num_seqs, max_num_batched_tokens)))
