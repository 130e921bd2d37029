"""The products with quantised weights through the compilers of TPUs and of an H200, on a machine that has neither.

That they compile says: every operation is known, and registers, VMEM (a limit is given) or shared memory suffice. For
TPUs any jax that the package runs on does; for an H200 those of `hopper.JAX_VERSIONS`: with another its tests are not
collected, and CI has an environment for it.
"""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from tests.aot import quant_matmul
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot

PRODUCTS = list(quant_matmul.products())


@pytest.mark.parametrize("target", [t for t in quant_matmul.TARGETS if t != "h200"])
def test_every_product_compiles_for_a_tpu_and_moves_no_weight(target):
    if reason := missing(target):
        pytest.skip(reason)
    programs = seen("quant_matmul", target).programs
    assert sorted(each["name"] for each in programs) == sorted(each.name for each in PRODUCTS)
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # A small weight may be fetched into VMEM, memory space 1, before the kernel begins; its layout stays.
        assert [line for line in each["copies"] if "S(1)" not in line] == [], each
        # x with zeros or rounded, and what was fetched; of 8 tokens there is hardly anything.
        assert each["temp_bytes"] < 2 * each["x_bytes"] + 2**23, each


class TestH200:
    """The kernel for Hopper."""

    __test__ = unsupported_jax() is None

    @pytest.mark.parametrize("given", PRODUCTS, ids=lambda given: given.name)
    def test_every_product_compiles_and_spills_nothing(self, given):
        if reason := missing("h200"):
            pytest.skip(reason)
        (program,) = [p for p in seen("quant_matmul", "h200").programs if p["name"] == given.name]
        ptxas = program["ptxas"]
        assert ptxas["spilled"] == [0]
        assert ptxas["for_hopper"] == 1
        assert not ptxas["waits"]  # wgmma that waits for itself
        # x with zeros or rounded, and at most 8 parts of split inputs. Of 8 tokens that is little, and no weight.
        x_and_parts = given.num_tokens * (4 * given.num_in + 32 * given.num_out)
        few = given.num_tokens == 8
        assert program["temp_bytes"] < (0.1 * program["argument_bytes"] if few else x_and_parts)
