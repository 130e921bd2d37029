"""The Mosaic GPU kernels through the real compiler, ptxas included, for an H200 that is not there.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment
from pallas_kernels.hopper import unsupported_jax, unsupported_reason_on
from pallas_kernels.paged_attention import gpu_layout
from tests.aot import paged_attention_gpu, swizzles
from tests.aot.compiling import ROOT, missing, seen

__test__ = unsupported_jax() is None
pytestmark = pytest.mark.aot

PROGRAMS = [
    f"{name}-{kind}" for name in paged_attention_gpu.ATTENTION for kind in ("decode", "mixed")
]
# More than `SPILLED` where accumulators are wide (at head dim 256 a loop reads 13 addresses) or tiles dequantised.
WIDE = (
    *(
        "head-dim-192",
        "head-dim-256",
        "head-dim-512",
        "head-dim-512-of-a-part",
        "int8-head-dim-192",
    ),
    *("int8", "int8-float16", "int4", "fp8"),
)
SPILLED_WIDE = 300
# Shapes whose keys are not cut for few queries.
UNCUT = ("head-dim-96", "head-dim-512", "window-soft-cap-sinks")


@pytest.fixture
def compiled():
    """What was found, by program."""
    if reason := missing("h200"):
        pytest.skip(reason)
    return {each["name"]: each for each in seen("paged_attention_gpu", "h200").programs}


def test_the_target_is_an_h200(compiled):
    device = seen("paged_attention_gpu", "h200").evidence.device
    assert device["kind"] == "NVIDIA H200"
    assert unsupported_reason_on(device["capability"]) is None


@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_compiles_and_copies_no_pool(compiled, name):
    """More shared memory than the chip has is an error of the compiler's, as the next test shows."""
    program = compiled[name]
    ptxas = program["ptxas"]
    shape, kind = name.rsplit("-", 1)
    by_xla = kind == "mixed" and shape.startswith("latents")  # rows with several queries
    in_parts = kind == "mixed" and shape not in UNCUT and not by_xla
    assert len(ptxas["spilled"]) == (2 if kind == "decode" or by_xla else 5 if in_parts else 3)
    assert ptxas["for_hopper"] == len(ptxas["spilled"])
    assert not ptxas["waits"]  # wgmma that waits for itself
    most = SPILLED_WIDE if kind == "mixed" and shape in WIDE else paged_attention_gpu.SPILLED[kind]
    assert max(ptxas["spilled"]) <= most
    # The parts of long rows, and at head dim 96 padded queries; the pool is nearly all of the arguments. The parts of
    # rows with few queries have bytes of their own. XLA has queries and their sums in other orders.
    parts = 1.1 * gpu_layout.PARTS_BYTES if in_parts else 0
    share = 0.4 if by_xla else 0.2
    assert program["temp_bytes"] < parts + share * program["argument_bytes"]


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_parts_of_long_rows_stay_within_their_bytes(compiled, kind):
    """Of 64 rows of 131,072 keys: 32 groups, for 8 KV heads. Rows with few queries take turns with theirs."""
    program = compiled[f"long-table-{kind}"]
    num_bytes = 64 * 32 * 8 * 128 * 8 * 4 if kind == "decode" else gpu_layout.PARTS_BYTES
    assert num_bytes < program["temp_bytes"] < 1.1 * num_bytes


def test_devices_that_share_the_heads_exchange_nothing(compiled):
    program = compiled["two-devices"]
    assert program["exchanges"] == []
    share = 2 * 64 * 64 * 64 * 4 * 128 * 2  # of the pool, which stays in place
    assert program["alias_bytes"] == share and program["temp_bytes"] < share // 4


def test_more_shared_memory_than_the_chip_has_is_refused(compiled):
    assert "exceeds available shared memory" in compiled["too-much-shared-memory"]["error"]


def test_no_kernel_misreads_slices_of_swizzled_memory(tmp_path):
    if reason := missing("h200"):
        pytest.skip(reason)
    variables = dict(each.split("=", 1) for each in environment(parse_target("h200")))
    told = variables | {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_MLIR_PASSES": "1"}
    command = [sys.executable, "-m", "tests.aot.swizzles"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    dumps = [path.read_text() for path in tmp_path.glob(swizzles.DUMPS)]
    assert sum(len(swizzles.transfers(dump)) for dump in dumps) > 100
    assert [line for dump in dumps for line in swizzles.misread(dump)] == []


def test_what_is_misread_is_known_by_its_strides():
    """As jax 0.11.2 wrote it for half the columns of 128, and for all of 64, of which code and TMA agree."""
    transfer = (
        '"mosaic_gpu.vector_load"(%1) <{optimized = false}> {in_transforms = '
        "[[#mosaic_gpu.tile<[1, 64]>, #mosaic_gpu.swizzle<128 : i32>]], out_layouts = []} : "
        "(memref<64x64xbf16, strided<[COLUMNS, 1], offset: ?>, #gpu.address_space<workgroup>>) -> vector<64x64xbf16>"
    )
    assert list(swizzles.misread(transfer.replace("COLUMNS", "128")))
    assert not list(swizzles.misread(transfer.replace("COLUMNS", "64")))
