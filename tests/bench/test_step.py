"""The breakdown of a decode step: operations are added up by part, and the real thing runs."""

import pytest

from jaxpage import tiny
from jaxpage.bench import step

PROGRAM = """
%ynn_fusion.1 = f32[8,64] fusion(%a), metadata={op_name="jit(step)/while/body/dot_general" id=1}
%gather.2 = u16[8] fusion(%b), metadata={op_name="jit(step)/while/body/jit(paged_attention)/dot_general"}
%exp.3 = f32[8] fusion(%c), metadata={op_name="jit(step)/jit(sample)/exp"}
%copy.4 = f32[8] copy(%d)
"""


def test_operations_are_added_up_by_part_and_containers_are_left_out():
    micros = {"ynn_fusion.1": 5.0, "gather.2": 2.0, "exp.3": 1.0, "copy.4": 0.5, "while.9": 99.0}
    assert step.by_part(micros, PROGRAM) == {
        "attention": 2.0,
        "KV write": 0.0,
        "sampling": 1.0,
        "matrix products": 5.0,
        step.OTHER: 0.5,
    }


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="--batch must be at least 1, got 0"):
        step.measure(step.StepBench(batch=(0,)))


@pytest.mark.slow
def test_a_step_is_taken_apart(tmp_path, capsys):
    model = tiny.write_checkpoint(tmp_path / "tiny", tiny.TINY_CONFIG)
    file = tmp_path / "report.json"
    step.main(step.StepBench(batch=(2,), context=20, model=model, json=file))
    report = step.json.loads(file.read_text())
    (result,) = report["results"]
    assert min(result["parts"].values()) > 0 and result["step"] > 0
    assert "matrix products" in capsys.readouterr().out
