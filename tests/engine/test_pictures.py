"""Pictures in prompts, on the host: encoded once, in the launch that needs them, and part of their blocks' keys."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from jaxpage.engine.padding import Padding
from jaxpage.request import WaitingFor
from tests.engine.harness import assert_expected, finish, make_engine, run
from tests.fakes import FakeMaskSource, make_pictures, make_request

PROMPT = [1, 2, *[0] * 9, 3, 4, 5]  # a picture of 9 tokens from the third on


def seeing(request_id, *spans, prompt=PROMPT, row=None, **options):
    """A request with pictures, of (first token, number of tokens, which one it is)."""
    pictures = make_pictures(prompt, *spans, row=row)
    return make_request(request_id, prompt, pictures=pictures, **options)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 4, 1000])
def test_a_picture_is_encoded_once_whatever_the_chunks(budget, overlap):
    engine = make_engine(
        picture_rows=9, max_num_batched_tokens=budget, overlap=overlap, decode_steps=4
    )
    request = seeing("a", (2, 9, 1), max_tokens=9, ignore_eos=True)
    run(engine, request)
    assert_expected(engine, request)
    assert len(engine.runner.encoded) == 1 == engine.stats().num_encoded_pictures


def test_plans_with_pictures_can_be_sent():
    engine = make_engine(picture_rows=20, sends_plans=True, max_num_batched_tokens=5)
    request = seeing("a", (2, 4, 1), (8, 3, 2), max_tokens=3)
    run(engine, request)
    assert_expected(engine, request)


def test_several_requests_with_one_picture_encode_it_once_and_beside_text():
    engine = make_engine(picture_rows=20, enable_prefix_caching=False)
    requests = [seeing(str(i), (2, 9, 1), max_tokens=4, n=1 + i % 2) for i in range(3)]
    requests += [make_request(f"text {i}", PROMPT, max_tokens=4) for i in range(2)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert len(engine.runner.encoded) == 1


def cached_tokens(*spans, first=(2, 9, 1)) -> int:
    """Of a prompt with pictures, after one with `first` was answered by the same engine."""
    engine = make_engine(picture_rows=20)
    run(engine, seeing("first", first, max_tokens=2))
    request = seeing("second", *spans, max_tokens=2)
    run(engine, request)
    assert_expected(engine, request)
    return request.num_cached_tokens


def test_only_the_same_picture_in_the_same_place_shares_blocks():
    assert cached_tokens((2, 9, 1)) == 12
    assert cached_tokens((2, 9, 2)) == 0
    assert cached_tokens((3, 9, 1)) == 0
    assert cached_tokens((5, 6, 1)) == 0
    assert cached_tokens() == 0, "placeholders without a picture are other tokens"
    assert cached_tokens((4, 7, 2), first=(4, 7, 1)) == 4


def test_a_prompt_wholly_in_the_prefix_cache_does_not_encode():
    engine = make_engine(picture_rows=12)
    run(engine, seeing("a", (2, 9, 1), max_tokens=2))
    run(engine, seeing("b", (4, 9, 2), prompt=[*PROMPT, 1, 2], max_tokens=2))
    assert len(engine.runner.encoded) == 2  # the second took the rows of the first
    again = seeing("c", (2, 9, 1), max_tokens=2)
    run(engine, again)
    assert_expected(engine, again)
    assert again.num_cached_tokens == 12 and len(engine.runner.encoded) == 2


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_ones_are_answered_alike_and_not_encoded_again(
    preemption_mode, enable_prefix_caching
):
    engine = make_engine(
        num_blocks=11,
        num_host_blocks=20,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
        picture_rows=27,
        max_num_batched_tokens=6,
    )
    requests = [seeing(str(i), (2, 9, i), max_tokens=16, seed=i) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_preemptions > 0
    assert max(Counter(engine.runner.encoded).values()) == 1


def test_a_picture_beyond_the_budget_waits_and_holds_up_nobody():
    engine = make_engine(picture_rows=30, max_num_batched_tokens=12)
    first = seeing("first", (0, 8, 1), prompt=[0] * 9, max_tokens=6, ignore_eos=True)
    second = seeing("second", (0, 8, 2), prompt=[0] * 9, max_tokens=3)
    text = make_request("text", [1, 2], max_tokens=3, ignore_eos=True)
    for request in (first, second, text):
        engine.add(request)
    engine.step()  # 8 of 12 embeddings are encoded: no second picture in this step
    assert len(engine.runner.encoded) == 1
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["second"]
    assert len(text.sequences[0].token_ids) == 3
    finish(engine)
    assert_expected(engine, first, second, text)


def test_a_running_sequence_waits_for_its_next_picture_in_a_state_of_its_own():
    engine = make_engine(picture_rows=30, max_num_batched_tokens=12)
    first = seeing("first", (0, 8, 1), (8, 8, 2), prompt=[0] * 17, max_tokens=6)
    second = seeing("second", (1, 8, 3), prompt=[3, *[0] * 8, 4], max_tokens=3)
    engine.add(first)
    engine.add(second)
    found = []
    for _ in range(3):
        engine.step()
        (sequence,) = second.sequences
        found.append((sequence.num_computed_tokens, sequence.waiting_for))
    # Each step encodes one of the three, as two are more than its budget.
    assert found == [(1, None), (1, WaitingFor.PICTURE), (10, None)]
    finish(engine)
    assert_expected(engine, first, second)


def test_what_a_sequence_is_halfway_through_is_not_evicted():
    engine = make_engine(picture_rows=10, max_num_batched_tokens=8, block_size=2)
    large = seeing("large", (0, 10, 1), prompt=[0] * 11, max_tokens=2)
    text = make_request("text", [1, 2], max_tokens=9, ignore_eos=True)
    other = seeing("other", (0, 6, 2), prompt=[0] * 7, max_tokens=2)
    for request in (text, large, other):
        engine.add(request)
    finish(engine)
    assert_expected(engine, large, text, other)
    assert len(engine.runner.encoded) == 2


def test_a_picture_that_never_fits_is_refused():
    engine = make_engine(picture_rows=8)
    with pytest.raises(ValueError, match="9 embeddings.*holds 8"):
        engine.add(seeing("a", (2, 9, 1)))
    assert not engine.has_unfinished_requests()


def test_tokens_that_end_rows_stay_text_and_take_no_room():
    """Of 9 tokens in rows of 3, in chunks of 4: 6 embeddings, in a cache of as many."""
    engine = make_engine(picture_rows=6, max_num_batched_tokens=4)
    requests = [seeing(str(i), (2, 9, i), row=3, max_tokens=4) for i in range(2)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert len(engine.runner.encoded) == 2
    with pytest.raises(ValueError, match="7 embeddings.*holds 6"):
        engine.add(seeing("a", (2, 9, 1), row=4))


def test_tokens_that_end_rows_are_none_of_the_embeddings_of_a_step():
    """Of two pictures of 6 tokens, a step of 8 tokens reaches all of one and a part of the other: 8 embeddings."""
    engine = make_engine(picture_rows=8, max_num_batched_tokens=8)
    request = seeing("a", (0, 6, 1), (6, 6, 2), prompt=[0] * 12 + [1], row=3, max_tokens=1)
    engine.add(request)
    engine.step()
    assert len(engine.runner.encoded) == 2
    finish(engine)
    assert_expected(engine, request)


def test_a_failed_launch_leaves_nothing_that_counts_as_encoded():
    engine = make_engine(picture_rows=20, fail_launch=(0,))
    lost = seeing("lost", (2, 9, 1), max_tokens=2)
    engine.add(lost)
    with pytest.raises(RuntimeError):
        engine.step()
    request = seeing("a", (2, 9, 1), max_tokens=2)
    run(engine, request)
    assert_expected(engine, request)


def test_new_weights_encode_anew():
    engine = make_engine(picture_rows=20, enable_prefix_caching=False)
    for request_id in "ab":
        run(engine, seeing(request_id, (2, 9, 1), max_tokens=2))
        engine.scheduler.begin_weight_epoch()
    assert len(engine.runner.encoded) == 2


def make_whole(**options):
    return make_engine(picture_rows=30, whole_pictures=True, **options)


def test_a_picture_that_must_be_whole_is_in_one_chunk():
    """Of steps of 10 tokens: what is before a picture, the picture and what still fits, the rest."""
    engine = make_whole(max_num_batched_tokens=10)
    request = seeing("a", (2, 9, 1), max_tokens=1)
    run(engine, request)
    assert_expected(engine, request)
    assert [plan.num_tokens for plan in engine.runner.plans] == [[2], [10], [2]]


def test_a_picture_that_must_be_whole_and_is_larger_than_a_step_is_refused():
    engine = make_whole(max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="takes 9 tokens.* a step has 8: raise max_num_batched"):
        engine.add(seeing("a", (2, 9, 1)))
    assert not engine.has_unfinished_requests()
    run(make_whole(max_num_batched_tokens=9), seeing("a", (2, 9, 1)))


def test_a_picture_that_must_be_whole_waits_for_room_and_nobody_overtakes_it():
    """9 of 10 tokens: it does not fit beside two that decode, and who comes later would keep it from ever running."""
    engine = make_whole(max_num_batched_tokens=10)
    others = [make_request(f"text {i}", [1, 2], max_tokens=5, ignore_eos=True) for i in range(2)]
    first = seeing("first", (0, 9, 1), prompt=[0] * 9 + [3], max_tokens=3)
    last = make_request("last", [1, 2], max_tokens=5)
    for request in (*others, first, last):
        engine.add(request)
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["first", "last"]
    finish(engine)
    assert_expected(engine, *others, first, last)


def test_a_picture_that_must_be_whole_is_not_cut_for_the_sake_of_padding():
    """10 tokens would be 8 and 2 by themselves, and 9 of them are a picture."""
    engine = make_whole(max_num_batched_tokens=64, padding=Padding((8, 64), overhead=1))
    text = make_request("text", [1] * 10, max_tokens=1)
    run(engine, text)
    request = seeing("a", (0, 9, 1), prompt=[0] * 9 + [3], max_tokens=1)
    run(engine, request)
    assert_expected(engine, text, request)
    assert [plan.num_tokens for plan in engine.runner.plans] == [[8], [2], [9], [1]]


def test_the_rest_of_a_picture_that_was_cached_is_computed_whole():
    """Its other half was computed beside all of it, so it may be read."""
    engine = make_whole(max_num_batched_tokens=10)
    run(engine, seeing("a", (2, 9, 1), max_tokens=1))
    request = seeing("b", (2, 9, 1), prompt=PROMPT[:11], max_tokens=1)
    run(engine, request)
    assert_expected(engine, request)
    assert request.num_cached_tokens == 8 and engine.runner.plans[-1].num_tokens == [3]


@pytest.mark.parametrize("seed", [1413, 2044, 2448, 2959])
def test_a_picture_of_a_step_that_never_runs_is_encoded_later(seed):
    answer_a_long_prompt(seed)


@pytest.mark.deep
def test_a_long_prompt_beside_one_that_waits_in_5_000_examples():
    for seed in range(5000):
        answer_a_long_prompt(seed)


def answer_a_long_prompt(seed: int) -> None:
    """Its pictures cut the chunks; another request takes blocks, and waits for masks. In about one of 500 examples a
    picture belongs to a row that finds no block when there are no other rows.
    """
    rng = random.Random(seed)
    num_tokens, prompt, spans = rng.randrange(60, 150), [], []
    while len(prompt) < num_tokens:
        prompt += [rng.randrange(7) for _ in range(rng.randrange(1, 20))]
        number = rng.randrange(1, 8)
        spans.append((len(prompt), number, 10 * number + rng.randrange(3)))
        prompt += [0] * number
    prompt.append(1)
    other = [i % 5 for i in range(rng.randrange(1, 30))]
    masks = FakeMaskSource(1, tuple(rng.choice((0, 1, 2, -1)) for _ in range(3)))
    engine = make_engine(
        overlap=rng.random() < 0.5,
        num_blocks=len(prompt) + 50 + rng.randrange(1, 40),
        enable_prefix_caching=rng.random() < 0.5,
        num_host_blocks=rng.choice((0, 400)),
        preemption_mode=rng.choice((None, "swap")),
        block_size=1,
        windows=(16, None),
        max_num_batched_tokens=32,
        max_num_seqs=3,
        picture_rows=20,
        max_model_len=200,
    )
    masked = make_request("masked", other, max_tokens=40, ignore_eos=True, mask_source=masks)
    request = seeing("seeing", *spans, prompt=prompt, max_tokens=2)
    engine.add(masked)
    for _ in range(rng.randrange(3)):
        engine.step()
    run(engine, request)
    assert_expected(engine, masked, request)


each_kind = pytest.mark.parametrize(
    "kind", ["usual", "whole pictures", "recurrent state", "ends of rows"]
)


@each_kind
@pytest.mark.parametrize("seed", range(12))
def test_any_workload(seed, kind):
    answer_anything(seed, kind)


@pytest.mark.deep
@each_kind
def test_any_workload_in_2_000_examples(kind):
    for seed in range(2000):
        answer_anything(seed, kind)


def answer_anything(seed: int, kind: str) -> None:
    """Small caches, few blocks, windows, chunks, overlap, host blocks, masks: each token reads its own embedding."""
    whole, is_recurrent = kind == "whole pictures", kind == "recurrent state"
    rng = np.random.default_rng(seed)
    engine = make_engine(
        num_blocks=int(rng.integers(24, 46)),
        block_size=int(rng.integers(2, 5)),
        num_host_blocks=int(rng.integers(0, 2)) * (0 if is_recurrent else 20),
        num_cached_states=int(rng.choice((1, 3, 20))) if is_recurrent else None,
        preemption_mode=[None, "swap", "recompute"][rng.integers(3)],
        picture_rows=int(rng.integers(7, 20)),
        whole_pictures=whole,
        max_num_batched_tokens=int(rng.integers(5 if whole else 3, 20)),
        max_num_seqs=int(rng.integers(1, 5)),
        max_model_len=26,
        overlap=bool(rng.integers(2)),
        decode_steps=int(rng.integers(1, 4)),
        windows=[(None,), (4, None)][rng.integers(2)],
    )
    requests = []
    for i in range(10):
        prompt, spans = [], []
        for _ in range(int(rng.integers(0, 4))):
            prompt += rng.integers(0, 13, rng.integers(0, 3)).tolist()
            number = int(rng.integers(1, 6))
            spans.append((len(prompt), number, 10 * number + int(rng.integers(3))))
            prompt += [0] * number
        prompt += rng.integers(0, 13, rng.integers(0 if prompt else 1, 3)).tolist()
        params = {"max_tokens": int(rng.integers(1, 7)), "n": int(rng.integers(1, 3)), "seed": i}
        if rng.integers(3) == 0:  # some wait for their masks while others go on
            params["mask_source"] = FakeMaskSource(i, (int(rng.integers(-1, 3)),))
        row = 2 if kind == "ends of rows" else None
        requests.append(seeing(str(i), *spans, prompt=prompt, row=row, **params))
    for request in requests:
        engine.add(request)
        if rng.integers(2):
            engine.step()
    finish(engine)
    assert_expected(engine, *requests)
