"""How prompts are cut where steps are padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.engine.padding import Padding

SIZES = (16, 64, 128, 256, 512, 1024, 2048)
CPU = Padding(SIZES, 16)
TPU = Padding(SIZES, 256)


@pytest.mark.parametrize(
    ("padding", "planned", "waiting", "budget"),
    [
        (CPU, 2, [64], 62),  # 64 and 16 instead of 128
        (CPU, 0, [66], 64),
        (CPU, 2, [62], 62),  # fits
        (CPU, 2, [40, 40], 80),  # 64 twice, or 128
        (CPU, 2, [75, 75], 126),  # 128 and 64 instead of 256
        (CPU, 40, [30], 30),  # the rest beside 40 rows that decode is 64 again
        (CPU, 64, [3], 3),  # no room in the size below
        (CPU, 0, [14], 14),
        (CPU, 10, [1000, 3000], 2038),  # as much as there may be
        (CPU, 3, [], 2045),
        (TPU, 2, [64], 64),  # the weights are read for 64 as for 128
        (TPU, 2, [300], 300),
        (TPU, 2, [1030], 1022),  # 1024 and 16 instead of 2048
        (Padding(), 2, [64], 64),
    ],
)
def test_a_step_is_filled_where_that_is_cheaper(padding, planned, waiting, budget):
    assert padding.budget(planned, 2048 - planned, waiting) == budget


sizes = st.lists(st.integers(1, 60), max_size=5, unique=True).map(sorted).map(tuple)


@given(sizes, st.integers(0, 40), st.integers(0, 60), st.lists(st.integers(1, 60), max_size=5))
def test_something_that_waits_gets_on(sizes, overhead, planned, waiting):
    most = max(0, (sizes or (100,))[-1] - planned)
    budget = Padding(sizes, overhead).budget(planned, most, waiting)
    assert bool(most) <= budget <= most
