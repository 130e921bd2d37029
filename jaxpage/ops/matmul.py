"""Products with quantised weights for a step: chooses the implementation. Knows no model.

On several devices XLA's products serve: linear layers stand inside the partitioned program, which divides a product
over outputs (q, k, v, gate, up) or inputs (o, down, and adds the parts) as the weight is sharded. It cannot divide a
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.hopper import unsupported_reason_on
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.quant_matmul.tune import kernel_of, tuned_sizes


@dataclass(frozen=True)
class Implementation:
    """Who computes a product: "tpu", "gpu" or "xla", and the `TileSizes` of that platform's kernel."""

    name: str
    sizes: Any = None


XLA = Implementation("xla")


def choose(
    weight: QuantizedWeight,
    *,
    platform: str,
    num_devices: int,
    dtype: DTypeLike = jnp.bfloat16,
    round_x: bool = False,
    device_kind: str = "",
    compute_capability: str | None = None,
) -> tuple[Implementation, str | None]:
    """Who computes it, and why it is not the platform's kernel. Of the weight shapes and dtypes suffice.

    device_kind and, of GPUs, compute_capability, as jax tells them: "NVIDIA H200", "9.0"; the sizes are those that
    were measured on such a device, and a capability of None is not looked at. Must be asked once for a weight, not for
    each number of tokens: the choice is a part of what its products are.
    """
    if platform not in ("tpu", "gpu"):
        return XLA, None
    if num_devices > 1:
        return XLA, f"{num_devices} devices share the weight, and XLA cannot divide a kernel"
    reason = kernel_of(platform).unsupported_reason(jnp.dtype(dtype), weight, round_x=round_x)
    if platform == "gpu" and compute_capability is not None:
        reason = unsupported_reason_on(compute_capability) or reason
    if reason:
        return XLA, reason
    return Implementation(platform, tuned_sizes(platform, device_kind)), None


def quant_matmul(
    x: jax.Array, weight: QuantizedWeight, *, implementation: Implementation, round_x: bool = False
) -> jax.Array:
    """x [..., E] times a weight [F, E] -> float32[..., F], by what `choose` chose."""
    rows = x.reshape(-1, x.shape[-1])
    if implementation == XLA:
        out = xla.quant_matmul(rows, weight, round_x=round_x)
    else:
        kernel = kernel_of(implementation.name)
        out = kernel.quant_matmul(rows, weight, round_x=round_x, sizes=implementation.sizes)
    return out.reshape(*x.shape[:-1], weight.shape[0])
