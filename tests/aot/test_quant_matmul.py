"""The products with quantised weights through the compilers of TPUs and of an H200, on a machine that has neither.

That they compile says: every operation is known, and registers, VMEM (a limit is given) or shared memory suffice. For
TPUs any jax that the package runs on does; for an H200 jax >= 0.11.2 (Python 3.12): with an older one its tests are not
collected, and CI has an environment for it.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import jax
import pytest

from jaxpage.aot.topology import missing_compiler
from tests.aot import quant_matmul, tpu

pytestmark = pytest.mark.aot

PROGRAMS = list(quant_matmul.programs())


@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
def test_every_program_compiles_for_a_tpu_and_moves_no_weight(topology):
    if find_spec("libtpu") is None:
        pytest.skip("the compiler of TPUs is missing: pip install 'jax[tpu]' (Linux on x86)")
    programs = quant_matmul.compile_all(topology)
    assert [each["name"] for each in programs] == [each.name for each in PROGRAMS]
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # A small weight may be fetched into VMEM, memory space 1, before the kernel begins; its layout stays.
        assert [line for line in each["copies"] if "S(1)" not in line] == [], each
        # x with zeros or rounded, and what was fetched; of 8 tokens there is hardly anything.
        assert each["temp_bytes"] < 2 * each["x_bytes"] + 2**23, each


@pytest.fixture(scope="module")
def programs():
    if reason := missing_compiler("gpu"):
        pytest.skip(reason)
    return {each["name"]: each for each in quant_matmul.compile_all("h200")}


class TestH200:
    """The kernel for Hopper."""

    __test__ = jax.__version_info__ >= (0, 11, 2)

    @pytest.mark.parametrize("given", PROGRAMS, ids=lambda given: given.name)
    def test_every_program_compiles_and_spills_nothing(self, programs, given):
        program = programs[given.name]
        assert "error" not in program, program["error"]
        kernels = re.findall(
            r"(\d+) bytes spill stores.*?Used (\d+) registers", program["ptxas"], re.S
        )
        assert [int(spilled) for spilled, _ in kernels] == [0]
        assert program["ptxas"].count("for 'sm_90a'") == 1
        assert "serialized" not in program["ptxas"], program["ptxas"]  # wgmma that waits for itself
        # x with zeros or rounded, and at most 8 parts of split inputs. Of 8 tokens that is little, and no weight.
        x_and_parts = given.num_tokens * (4 * given.num_in + 32 * given.num_out)
        few = given.num_tokens == 8
        assert program["temp"] < (0.1 * program["arguments"] if few else x_and_parts)
