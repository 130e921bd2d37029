"""Lookups in a table: the TPU kernel, interpreted, against the definition, bit for bit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.device import Device
from jaxpage.ops import embedding
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.embedding import cases, reference, tpu
from pallas_kernels.embedding.cases import CASES, Case

# The last slab of a ragged table ends in the padding of its tiles, which holds anything.
INTERPRETED = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)
kernel = jax.jit(partial(tpu.lookup, interpret=INTERPRETED))


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def rows_of(case: Case) -> np.ndarray:
    """The bits of the result: XLA on a CPU changes those of NaNs."""
    arguments = cases.arguments(case)
    return np.asarray(reference.lookup(jnp.asarray(bits(arguments["table"])), arguments["ids"]))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tpu(case):
    found = kernel(**cases.arguments(case))
    assert found.dtype == case.dtype
    np.testing.assert_array_equal(bits(found), rows_of(case))
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((201088, 2880), "bfloat16", None),
        ((50272, 2880), "bfloat16", None),  # of one of four devices
        ((201088, 2880), "float32", None),
        ((151936, 896), "bfloat16", "lies by row"),
        ((1000, 2880), "bfloat16", "lies by row"),
        ((131072, 2040), "bfloat16", "whole registers of 16"),
        ((131072, 2036), "float32", "whole registers of 8"),
        ((201088, 28816), "bfloat16", "of VMEM"),
        ((201088, 2880), "float16", "is float16"),
    ],
)
def test_what_the_kernel_can_serve(shape, dtype, reason):
    found = tpu.unsupported_reason(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    assert found is None if reason is None else reason in (found or "")


def test_an_unsupported_call_says_why():
    arguments = cases.arguments(Case(name="", width=256, num_tokens=2))
    with pytest.raises(NotImplementedError, match="lies by row"):
        tpu.lookup(arguments["table"], arguments["ids"])


TPU = Device(platform="tpu", kind="TPU v6 lite")
GPT_OSS = jax.ShapeDtypeStruct((201088, 2880), jnp.bfloat16)
IDS = jnp.asarray([[0, 1023, 4095], [-1, 5, 5], [2047, 2048, 4096], [9999, -4097, 7]], jnp.int32)


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), (TENSOR,))


def table_of(num_rows: int) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((num_rows, 144)), jnp.bfloat16)


@pytest.mark.parametrize(("num_devices", "most_tokens"), [(1, 3142), (4, 785), (8, 392), (3, 3142)])
def test_the_kernel_is_chosen_up_to_the_tokens_for_which_xla_moves_fewer_bytes(
    num_devices, most_tokens
):
    """Of the rows of one device; three devices have all rows each."""
    mesh = mesh_of(num_devices)
    spec = P() if num_devices == 3 else P(TENSOR)
    kernel = embedding.choose(GPT_OSS, TPU, mesh=mesh, spec=spec).chosen
    assert kernel == embedding.LookupKernel("tpu", most_tokens, mesh, spec)
    served = [kernel.serves(num) for num in (0, 1, most_tokens, most_tokens + 1)]
    assert served == [False, True, True, False]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_finds_what_the_kernel_does_not(platform):
    by_row = jax.ShapeDtypeStruct((151936, 896), jnp.bfloat16)
    table = by_row if platform == "tpu" else GPT_OSS
    choice = embedding.choose(table, Device(platform=platform))
    assert choice.chosen is embedding.XLA
    assert ("lies by row" in (choice.reason or "")) == (platform == "tpu")


def test_a_table_whose_columns_devices_share_is_left_to_xla():
    choice = embedding.choose(GPT_OSS, TPU, mesh=mesh_of(2), spec=P(None, TENSOR))
    assert choice.chosen is embedding.XLA and "shared by devices" in (choice.reason or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "spec"), [(1, P()), (1, P(TENSOR)), (4, P(TENSOR)), (2, P())]
)
def test_a_lookup_by_the_kernel_is_that_by_xla(num_devices, spec):
    """Interpreted; also of ids that are outside, and on devices that share the table, or have all of it each."""
    table, mesh = table_of(4096), mesh_of(num_devices)
    kernel = embedding.choose(table, TPU, mesh=mesh, spec=spec).chosen
    assert kernel.serves(IDS.size)
    want = jax.jit(embedding.lookup)(table, IDS)
    with pltpu.force_tpu_interpret_mode():
        found = jax.jit(partial(embedding.lookup, kernel=kernel))(table, IDS)
    assert found.shape == (*IDS.shape, 144)
    np.testing.assert_array_equal(bits(found), bits(want))


def test_more_tokens_are_left_to_xla():
    """The same program as without a kernel."""
    table, kernel = table_of(128), embedding.LookupKernel("tpu", most_tokens=IDS.size - 1)
    texts = {
        jax.jit(partial(embedding.lookup, kernel=each)).lower(table, IDS).as_text()
        for each in (kernel, embedding.XLA)
    }
    assert len(texts) == 1
