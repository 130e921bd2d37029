import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpage.plan import StepResult
from jaxpage.runner.calls import Call
from jaxpage.runner.recording import (
    CALLS,
    END,
    HEADER,
    RESULT,
    CallRecorder,
    frames,
    read_calls,
    read_result,
    record_to,
)

CALLS_MADE = [
    Call("admit", (np.arange(7, dtype=np.int32),)),
    Call("load blocks", (np.array(3, np.int32), np.ones((2, 4), ml_dtypes.bfloat16))),
    Call("reset"),
    Call("set masks", (np.zeros((0, 3), np.uint32), np.array([True, False]))),
]


def result():
    shape = (2, 3)
    return StepResult(
        token_ids=np.arange(6, dtype=np.int32).reshape(shape),
        num_sampled=np.array([2, 0, 1], np.int32),
        logprobs=np.full(shape, -0.5, np.float32),
        ranks=np.ones(shape, np.int32),
        top_token_ids=np.zeros((*shape, 0), np.int32),
        top_logprobs=np.zeros((*shape, 0), np.float32),
    )


def assert_equal(array, expected):
    assert array.dtype == expected.dtype and array.shape == expected.shape
    np.testing.assert_array_equal(array, expected)


def test_calls_and_results_come_back_as_they_were():
    file = io.BytesIO()
    recorder = CallRecorder(file, {"options": {"model": "x"}})
    recorder.calls(CALLS_MADE)
    recorder.result(0, result())
    file.seek(0)
    (kind, header, _), (calls, programs, buffers), (last, metadata, arrays) = frames(file)
    assert (kind, calls, last) == (HEADER, CALLS, RESULT)
    assert header == {"options": {"model": "x"}} and metadata == {"launch": 0}
    for call, expected in zip(read_calls(programs, buffers), CALLS_MADE, strict=True):
        assert call.program == expected.program
        for buffer, wanted in zip(call.buffers, expected.buffers, strict=True):
            assert_equal(buffer, wanted)
    for name in ("token_ids", "num_sampled", "top_logprobs"):
        assert_equal(getattr(read_result(arrays), name), getattr(result(), name))


def test_a_file_appears_whole_and_no_longer_than_allowed(tmp_path, caplog):
    path = tmp_path / "calls"
    recorder = record_to(path, {})
    recorder.calls(CALLS_MADE)
    assert not path.exists()
    recorder.close()
    recorder.close()
    assert [kind for kind, _, _ in frames(io.BytesIO(path.read_bytes()))] == [HEADER, CALLS, END]
    file = io.BytesIO()
    recorder = CallRecorder(file, {}, max_bytes=1500)
    for _ in range(9):
        recorder.calls(CALLS_MADE)
    assert len(file.getvalue()) <= 1500 and "later calls are left out" in caplog.text
    kinds = [kind for kind, _, _ in frames(io.BytesIO(file.getvalue()))]
    assert kinds[:2] == [HEADER, CALLS] and kinds.index(END) == len(kinds) - 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_stops_the_recording_and_not_the_engine(tmp_path, caplog):
    path, partial = tmp_path / "calls", tmp_path / "calls.partial"
    partial.symlink_to("/dev/full")
    recorder = record_to(path, {})
    recorder.calls(CALLS_MADE)
    recorder.close()
    assert partial.is_symlink() and not path.exists()
    (record,) = caplog.records
    assert str(partial) in record.message and "No space left on device" in record.message


def test_a_torn_last_frame_is_left_out_and_other_bytes_are_refused(tmp_path):
    path = tmp_path / "calls"
    recorder = record_to(path, {})
    recorder.calls(CALLS_MADE)
    recorder.close()
    whole = path.read_bytes()
    for length, kinds in ((len(whole) - 1, [HEADER, CALLS]), (len(whole) // 2, [HEADER])):
        assert [kind for kind, _, _ in frames(io.BytesIO(whole[:length]))] == kinds
    for foreign in (b"x" * 100, (9).to_bytes(8, "little") + b"y" * 9):
        with pytest.raises(ValueError, match="not a frame of a recording"):
            list(frames(io.BytesIO(foreign)))
