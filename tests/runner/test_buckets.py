import itertools

import numpy as np
import pytest

from jaxpage.plan import StepPlan
from jaxpage.runner.buckets import (
    MAX_PROGRAMS,
    Bucket,
    fitting_buckets,
    fitting_programs,
    make_buckets,
    start_order,
)


def plan(num_tokens):
    count = len(num_tokens)
    return StepPlan(slots=[1] * count, num_tokens=list(num_tokens), samples=[True] * count)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 100, 256, 1024, 4096])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64, 512, 2048, 4096, 16384])
def test_any_configuration_needs_few_programs_and_holds_every_plan(
    max_num_seqs, max_num_batched_tokens
):
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    first, then = start_order(buckets)
    assert len({*first, *then}) == len([*first, *then]) <= MAX_PROGRAMS
    assert first[-1] == f"sample R={min(8, buckets[-1].num_rows)}"
    some = {1, 2, 7, max_num_batched_tokens // 3 + 1, max_num_batched_tokens}
    for rows, tokens in itertools.product((1, 2, max_num_seqs // 2 + 1, max_num_seqs), some):
        if rows <= max_num_seqs and tokens <= max_num_batched_tokens:
            mixed = plan([tokens] + [0] * (rows - 1))  # one prompt and its forks
            bucket = fitting_buckets(buckets, mixed)[0]
            assert set(bucket.programs(rows)) <= {*first, *then}
            assert bucket.num_tokens >= tokens and bucket.num_rows >= rows
        if rows <= min(max_num_seqs, max_num_batched_tokens):
            assert fitting_buckets(buckets, plan([1] * rows))[0].decode


def test_default_cpu_configuration():
    buckets = make_buckets(max_num_seqs=256, max_num_batched_tokens=2048)
    assert [b.num_rows for b in buckets if b.decode] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert [b.num_tokens for b in buckets if not b.decode] == [16, 64, 128, 256, 512, 1024, 2048]
    assert fitting_buckets(buckets, plan([1] * 5))[0] == Bucket(8, 8, True)
    fitting = fitting_buckets(buckets, plan([1] * 30 + [50]))
    assert fitting[0] == Bucket(128, 256, False) and len(fitting) == 5
    assert fitting[0].programs(31) == ("forward T=128", "sample R=256")
    forks = fitting_buckets(buckets, plan([1, 0, 0]))[0]  # a one-token prompt, n = 3
    assert forks.programs(3) == ("forward T=16", "sample R=8")
    first, then = start_order(buckets)
    assert first == ["forward T=256", "sample R=8"]
    assert then[:4] == ["decode R=8", "decode R=256", "forward T=2048", "sample R=256"]


def test_a_lone_embedding_is_no_decode_step():
    """The last position of a prompt of embeddings may be alone in a step."""
    buckets = make_buckets(max_num_seqs=8, max_num_batched_tokens=64)
    lone = plan([1])
    lone.input_embeds.append((0, np.zeros((1, 4), np.float32)))
    assert [b.decode for b in fitting_buckets(buckets, lone)] == [False] * 2


def test_fill_is_the_share_of_tokens_that_are_no_padding():
    buckets = make_buckets(max_num_seqs=256, max_num_batched_tokens=2048)
    for rows, fill in (([1] * 5, 5 / 8), ([3, 37], 40 / 64), ([0, 0], 0.0)):
        assert fitting_programs(buckets, plan(rows))[0].fill(plan(rows)) == fill


def test_a_plan_beyond_every_bucket_is_refused_with_numbers():
    buckets = make_buckets(max_num_seqs=4, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="17 tokens in 1 rows"):
        fitting_buckets(buckets, plan([17]))
