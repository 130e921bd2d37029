"""Steps of real shapes, of two layers, compiled for topologies of up to four hosts and for eight H200.

What devices exchange is asserted by kind, number and bytes, and that `jaxpage plan` reckons the same from the shapes.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.meshes import CASES, FEW, TARGETS, Case, case_of
from tests.aot.models import MODELS

pytestmark = pytest.mark.aot

MOVE = re.compile(r" (?:slice|copy)-(?:start|done)\(")
ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]+)\]")
NUM_TOP_LOGPROBS = 20
# Numbers of each token that all devices get, where some heads are padding: of queries, and of what they attended to.
GATHERED = {"Qwen2.5-0.5B": [16 * 64], "Phi-4": [40 * 128, 48 * 128]}
SAMPLED_BYTES = 4 * (3 + 2 * NUM_TOP_LOGPROBS)  # token, logprob, rank, and the most likely others


@pytest.fixture(params=TARGETS)
def found(request) -> list[tuple[Case, dict]]:
    """Of each case in turn the decode step, then the prefill step."""
    if reason := missing(request.param):
        pytest.skip(reason)
    programs = seen("meshes", request.param).programs
    found = [(case_of(request.param, each["name"]), each) for each in programs]
    return sorted(found, key=lambda each: (CASES.index(each[0]), not is_decode(each[1])))


def test_a_decode_step_and_a_prefill_step_of_each_case(found):
    cases = [case for case in CASES if case.target == found[0][0].target]
    assert [case for case, _ in found] == [case for case in cases for _ in range(2)]
    assert [is_decode(each) for _, each in found] == [True, False] * len(cases)
    assert all(each["num_layers"] == FEW for _, each in found)


def test_the_pool_stays_where_it_is_and_temporaries_are_bounded(found):
    for _, each in found:
        assert each["alias_bytes"] >= each["pool_bytes"] + each["state_bytes"], each
        # An array that is small enough XLA may move to VMEM and back: scales, and a pool of a few hundred blocks.
        assert [line for line in each["pool_copies"] if not is_small_move(line)] == [], each
        assert each["temp_bytes"] < each["most_temp_bytes"], each


def is_small_move(line: str) -> bool:
    array = ARRAY.search(line)
    assert array is not None, line
    num_bytes = int(array[1]) // 8 * math.prod(map(int, array[2].split(",")))
    return MOVE.search(line) is not None and num_bytes < 2**25


def test_kernels_serve_attention_and_int8_products(found):
    for case, each in found:
        # An H200 copies the scales of two KV heads at once: with one on a device, attention of int8 is XLA's.
        has_one_head = MODELS[case.model]["num_key_value_heads"] == case.num_devices
        has_kernel = not (case.is_int8 and has_one_head and case.target == "h200:8")
        # There a step with prompts has one for decoding rows and one for prompts.
        assert each["attention_calls"] % FEW == 0, each
        assert (each["attention_calls"] > 0) is has_kernel, each
        assert each["product_calls"] == expected_products(case, each), each


def expected_products(case: Case, each: dict) -> int:
    """Calls of the kernel: q, k, v, o, gate, up, down and, where a step samples, the head. That for Hopper makes 128
    outputs at a time: a head of which a device has other shares is XLA's.
    """
    if not case.is_int8:
        return 0
    share = MODELS[case.model]["vocab_size"] // case.num_devices
    has_head = is_decode(each) and (case.target != "h200:8" or share % 128 == 0)
    return 7 * FEW + has_head


def test_devices_exchange_these_bytes_and_no_more(found):
    """A sum of hidden states after each MLP, the embedding and, if its weights are divided, each attention; heads, if
    some are padding. Of int8 weights the largest number of each row before. A device's share of the logits, of all
    columns for its own rows; then what was sampled, in as many calls as the compiler likes.
    """
    for case, each in found:
        rows = each["num_tokens"]
        expected = expected_exchange(case, each)
        others = 0
        for kind, count, num_bytes in each["exchanges"]:
            of_these = min(count, expected.pop((kind, num_bytes), 0))
            others += (count - of_these) * num_bytes
        others -= rows * SAMPLED_BYTES if is_decode(each) else 0
        assert expected == {}, each
        assert others == 0, each


def expected_exchange(case: Case, each: dict) -> dict[tuple[str, int], int]:
    """Calls by kind and bytes, without what was sampled."""
    model, rows = MODELS[case.model], each["num_tokens"]
    hidden, products = rows * model["hidden_size"], (1 + has_own_heads(case)) * FEW
    # XLA's own products are summed in float32 on a GPU.
    of_products = hidden * (4 if case.target == "h200:8" else 2)
    calls = [(("all-reduce", hidden * 2), 1), (("all-reduce", of_products), products)]
    for heads_of_a_row in GATHERED.get(case.model, ()):
        calls.append((("all-gather", rows * heads_of_a_row * 2), FEW))
    if case.is_int8:
        calls.append((("all-reduce", rows * 4), products))
    if is_decode(each):
        logits = rows * model["vocab_size"] * 4 // case.num_devices
        calls.append((("all-to-all", logits), 1))
    expected = Counter()
    for of_size, count in calls:
        expected[of_size] += count
    return dict(expected)


def test_a_plan_reckons_the_same_bytes(found):
    for _, each in found:
        if is_decode(each):
            rows = each["num_tokens"]
            reckoned = sum(count * num_bytes * rows for _, count, num_bytes in each["reckoned"])
            assert reckoned == sum(count * num_bytes for _, count, num_bytes in each["exchanges"])


def has_own_heads(case: Case) -> bool:
    """Query heads divide, so that no device computes what another one does."""
    return MODELS[case.model]["num_attention_heads"] % case.num_devices == 0


def is_decode(each: dict) -> bool:
    return " decode " in each["name"]
