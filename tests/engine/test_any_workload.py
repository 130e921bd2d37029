"""The same request gives the same tokens, whatever the engine's sizes and its company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.engine.padding import NO_PADDING, Padding
from jaxpage.kv_groups import most_blocks
from tests.engine.events import aborts, arrivals, events, play
from tests.engine.harness import assert_expected, make_engine
from tests.fakes import (
    VOCAB_SIZE,
    FakeMaskSource,
    FakeStore,
    expected_output,
    make_adapter,
    make_request,
)

MAX_MODEL_LEN = 64
PREFIXES = [[], [i % 5 for i in range(50)], [i % 3 for i in range(50)]]

token = st.integers(0, VOCAB_SIZE - 1)


delays = st.lists(st.integers(-1, 3), min_size=1, max_size=3).map(tuple)
mask_sources = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.builds(
        FakeMaskSource,
        st.integers(0, 2),
        delays,
        forces=st.booleans(),
        fails_after=st.none() | st.none() | st.integers(0, 5),
    ),
)


def as_embeds(token_ids: list[int]) -> np.ndarray:
    """float32[T, 2]: equal tokens have equal embeddings."""
    return np.asarray([[i, 0.5] for i in token_ids], np.float32)


@st.composite
def requests(draw):
    """Request, step of its arrival, steps until it is aborted (None: never)."""
    prefix = draw(st.sampled_from(PREFIXES))
    prompt = prefix[: draw(st.integers(0, 50))] + draw(st.lists(token, min_size=1, max_size=5))
    if draw(st.sampled_from([False] * 5 + [True])):
        prompt = as_embeds(prompt)
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 12)))
    options = {
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens or 3)),
        "seed": draw(st.integers(0, 2)),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from([None, None, "a"])),
        "eos": draw(st.sampled_from([(), (3,)])),
        "stop_token_ids": draw(st.sampled_from([[], [5, 3]])),
        "stop": draw(st.sampled_from([[], ["c"], ["ab", "b"]])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "skip_reading_prefix_cache": draw(st.sampled_from([None, None, True])),
        "mask_source": draw(mask_sources),
        "adapter": draw(st.sampled_from([None, None, *map(make_adapter, (1, 2, 3))])),
    }
    if options["mask_source"] is not None and options["logprobs"] is not None:
        options["mask_source"].forces = False  # nobody says how likely a forced token was
    return prompt, options, draw(arrivals), draw(aborts)


# Of the KV-cache groups, those with windows first. One group of everything is the usual model.
WINDOWS = [(None,), (None,), (1,), (5,), (4, None), (7, 7, None), (3, 9), (16, None, None)]


@st.composite
def engines(draw, *, may_be_recurrent: bool = True):
    states = [None, None, 0, 1, 3, 20] if may_be_recurrent else [None]
    num_cached_states = draw(st.sampled_from(states))
    is_recurrent = num_cached_states is not None
    num_drafts = draw(st.sampled_from([0, 0, 1, 4]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    windows = draw(st.sampled_from(WINDOWS))
    max_tokens = draw(st.sampled_from([1, 2, 7, 64, 1000]))
    smallest = most_blocks(windows, MAX_MODEL_LEN - 1, block_size, max_tokens) + 1
    return {
        "block_size": block_size,
        "windows": windows,
        "num_blocks": smallest + draw(st.one_of(st.integers(0, 8), st.just(400))),
        "max_num_seqs": draw(st.integers(1, 6)),
        "samples_late": draw(st.booleans()),
        "max_num_batched_tokens": max_tokens,
        "enable_prefix_caching": draw(st.booleans()) if not is_recurrent else num_cached_states > 0,
        "num_cached_states": num_cached_states,
        "least_tokens": draw(st.integers(1, 20)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "num_drafts": num_drafts,
        "has_draft_model": num_drafts > 0 and draw(st.booleans()),
        "decode_steps": 1 if num_drafts else draw(st.sampled_from([1, 1, 2, 5, 8])),
        "padding": draw(st.sampled_from([NO_PADDING, Padding((1, 2, 4, 8, 16, 32, 64), 1)])),
        "overlap": draw(st.just(False) if num_drafts else st.booleans()),
        "num_host_blocks": 0 if is_recurrent else draw(st.sampled_from([0, 1, 3, 10, 100])),
        "preemption_mode": draw(st.sampled_from([None, "swap", "recompute"])),
        "store": draw(st.one_of(st.none(), st.builds(FakeStore))),
        "max_model_len": MAX_MODEL_LEN,
        "sends_plans": draw(st.sampled_from([False, False, False, True])),
        "num_adapters": draw(st.sampled_from([1, 1, 2, 3, 5])),
    }


def check_workload(engine_options: dict, workload: list, events: dict[int, str]) -> None:
    engine = make_engine(**engine_options)
    todo = [
        (make_request(str(i), prompt, **options), arrival, abort)
        for i, (prompt, options, arrival, abort) in enumerate(workload)
    ]
    assert_expected(engine, *play(engine, todo, events))
    for request, _, _ in todo:
        completions = engine.outputs[request.request_id].outputs
        for s, c in zip(request.sequences, completions, strict=False):  # perhaps not all began
            wanted, _, _ = expected_output(request, s.index, MAX_MODEL_LEN)
            told = s.output_token_ids
            if (
                s.finish_reason == "abort" and request.mask_source is not None
            ):  # in the midst of what is forced
                told = s.token_ids[len(request.prompt_token_ids) : s.num_reported_tokens]
            assert told == wanted[: len(told)]
            assert s.num_in_flight == 0 and c.token_ids == told
            if request.params.logprobs is not None:
                assert [next(iter(x)) for x in c.logprobs] == told


@settings(max_examples=30, deadline=None)
@given(engines(), st.lists(requests(), min_size=1, max_size=7), events)
def test_tokens_do_not_depend_on_the_engine_or_on_the_company(engine_options, workload, events):
    check_workload(engine_options, workload, events)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(engines(), st.lists(requests(), min_size=1, max_size=10), events)
def test_tokens_do_not_depend_on_the_engine_or_on_the_company_in_depth(
    engine_options, workload, events
):
    check_workload(engine_options, workload, events)


@pytest.mark.deep
def test_tokens_do_not_depend_on_the_engine_or_on_the_company_in_20_000_examples():
    workloads = given(engines(), st.lists(requests(), min_size=1, max_size=10), events)
    settings(max_examples=20_000, deadline=None)(workloads(check_workload))()
