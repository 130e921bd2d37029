"""A plan is values: it survives the way through bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxpage.plan import Admission, BlockTransfers, StepPlan, plan_from_bytes, plan_to_bytes

ints = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from(
    [np.float32, np.uint32, np.int8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)


@st.composite
def arrays(draw, dtype=None):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = np.dtype(dtype or draw(dtypes))
    count = int(np.prod(shape)) * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    if dtype == np.bool_:
        content = bytes(b & 1 for b in content)
    return np.frombuffer(content, dtype).reshape(shape)


leaves = st.one_of(
    st.none(), st.booleans(), ints, st.floats(allow_nan=False), st.text(), st.binary(), arrays()
)
values = st.recursive(
    leaves,
    lambda x: st.one_of(
        st.lists(x), st.lists(x).map(tuple), st.dictionaries(st.one_of(ints, st.text()), x)
    ),
    max_leaves=8,
)


def tuples(*elements):
    return st.lists(st.tuples(*elements), max_size=4)


admissions = st.builds(
    Admission,
    slot=ints,
    sequence_index=ints,
    token_ids=st.lists(ints),
    block_tables=st.lists(st.lists(ints), max_size=3),
    prompt_len=ints,
    max_len=ints,
    fields=st.dictionaries(st.text(), values, max_size=4),
)
transfers = st.builds(
    BlockTransfers,
    stores=tuples(ints, st.binary()),
    loads=tuples(ints, st.lists(arrays(), max_size=2)),
    swaps_out=tuples(ints, ints),
    swaps_in=tuples(ints, ints),
)
plans = st.builds(
    StepPlan,
    slots=st.lists(ints),
    starts=st.lists(ints),
    num_tokens=st.lists(ints),
    samples=st.lists(st.booleans()),
    num_late_rows=ints,
    num_steps=ints,
    features=ints,
    masks=st.dictionaries(ints, arrays(np.uint32), max_size=3),
    input_embeds=tuples(ints, arrays()),
    admissions=st.lists(admissions, max_size=2),
    table_updates=tuples(ints, ints, ints, ints),
    block_copies=tuples(ints, ints),
    transfers=st.one_of(st.none(), transfers),
)


def assert_equal(found: Any, wanted: Any) -> None:
    """The same types and values all the way down."""
    assert type(found) is type(wanted)
    if dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_equal(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        assert_equal(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert_equal(x, y)
    else:
        assert found == wanted


@settings(max_examples=20, deadline=None)
@given(plans)
def test_a_plan_survives_the_way_through_bytes(plan):
    assert_equal(plan_from_bytes(plan_to_bytes(plan)), plan)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plans)
def test_a_plan_survives_the_way_through_bytes_in_depth(plan):
    assert_equal(plan_from_bytes(plan_to_bytes(plan)), plan)


def test_numpy_scalars_keep_their_types():
    fields = {"x": np.float32(0.1), "y": np.uint32(7), "z": ml_dtypes.bfloat16(1.5)}
    admission = Admission(
        slot=1,
        sequence_index=0,
        token_ids=[3],
        block_tables=[[1]],
        prompt_len=1,
        max_len=4,
        fields=fields,
    )
    (found,) = plan_from_bytes(plan_to_bytes(StepPlan(admissions=[admission]))).admissions
    assert_equal(found.fields, fields)


def test_what_cannot_be_stored_is_refused_by_its_type():
    with pytest.raises(TypeError, match="a object cannot be a part of a stored plan"):
        plan_to_bytes(StepPlan(transfers=BlockTransfers(loads=[(1, object())])))


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(100), plan_to_bytes(StepPlan())[:-3]])
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="are not a plan"):
        plan_from_bytes(data)
