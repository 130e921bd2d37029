"""Products with quantised weights for a step: chooses the implementation. Knows no model.

On several devices XLA's products serve: linear layers stand inside the partitioned program, which divides a product
over outputs (q, k, v, gate, up) or inputs (o, down, and adds the parts) as the weight is sharded. It cannot divide a
kernel.

For int8 weights each row of x is rounded to int8 too: integers are summed exactly, whoever computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.device import Device
from jaxpage.ops.implementations import Choice, Implementation, first_supported, require
from pallas_kernels import hopper, tuning
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.quant_matmul.tune import kernel_of, tuned_sizes


@dataclass(frozen=True)
class MatmulKernel:
    """What computes a product: XLA, or the kernel of "tpu" or "gpu" with the tile sizes of a kind of device."""

    platform: str | None
    sizes: tuning.Sizes | None = None


XLA = MatmulKernel(None)


@dataclass(frozen=True, kw_only=True)
class _Request:
    weight: QuantizedWeight
    dtype: jnp.dtype  # of x
    device: Device
    num_devices: int


def _accept_kernel(request: _Request) -> MatmulKernel:
    platform, weight = request.device.platform, request.weight
    if request.num_devices > 1:
        require(f"{request.num_devices} devices share the weight, and XLA cannot divide a kernel")
    rounds = _rounds_x(weight)
    require(kernel_of(platform).unsupported_reason(request.dtype, weight, round_x=rounds))
    return MatmulKernel(platform, tuned_sizes(platform, request.device.kind))


def _accept_hopper(request: _Request) -> MatmulKernel:
    require(hopper.unsupported_reason_on(request.device.compute_capability))
    kernel = _accept_kernel(request)
    require(hopper.unsupported_ptxas_here())
    return kernel


IMPLEMENTATIONS: tuple[Implementation[_Request, MatmulKernel], ...] = (
    Implementation("tpu", "tpu", _accept_kernel),
    Implementation("hopper", "gpu", _accept_hopper),
    Implementation("xla", None, lambda request: XLA),
)


def choose(
    weight: QuantizedWeight, device: Device, *, num_devices: int, dtype: DTypeLike = jnp.bfloat16
) -> Choice[MatmulKernel]:
    """What computes products with x of `dtype` there. Of the weight shapes and dtypes suffice.

    Ask once for a weight, not for each number of tokens: the choice is a part of what its products are.
    """
    request = _Request(
        weight=weight, dtype=jnp.dtype(dtype), device=device, num_devices=num_devices
    )
    return first_supported("quant_matmul", IMPLEMENTATIONS, request, device.platform)


def quant_matmul(x: jax.Array, weight: QuantizedWeight, *, kernel: MatmulKernel) -> jax.Array:
    """x [..., E] times a weight [F, E] -> float32[..., F], by what `choose` chose."""
    rows, rounds = x.reshape(-1, x.shape[-1]), _rounds_x(weight)
    if kernel.platform is None:
        out = xla.quant_matmul(rows, weight, round_x=rounds)
    else:
        product = kernel_of(kernel.platform).quant_matmul
        out = product(rows, weight, round_x=rounds, sizes=kernel.sizes)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _rounds_x(weight: QuantizedWeight) -> bool:
    return weight.format == "int8"
