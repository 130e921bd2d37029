"""Products with quantised weights for a step: chooses the implementation. Knows no model.

On several devices XLA's products serve: linear layers stand inside the partitioned program, which divides a product
over outputs (q, k, v, gate, up) or inputs (o, down, and adds the parts) as the weight is sharded. It cannot divide a
kernel.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight

XLA = "xla"


def choose(
    weight: QuantizedWeight,
    *,
    platform: str,
    num_devices: int,
    dtype: DTypeLike = jnp.bfloat16,
    round_x: bool = False,
) -> tuple[str, str | None]:
    """ "tpu", "gpu" or "xla", and why it is not the platform's kernel. Of the weight shapes and dtypes suffice.

    Must be asked once for a weight, not for each number of tokens: the choice is a part of what its products are.
    """
    if platform not in ("tpu", "gpu"):
        return XLA, None
    if num_devices > 1:
        return XLA, f"{num_devices} devices share the weight, and XLA cannot divide a kernel"
    reason = _kernel(platform).why_not(jnp.dtype(dtype), weight, round_x=round_x)
    return (XLA, reason) if reason else (platform, None)


def quant_matmul(
    x: jax.Array, weight: QuantizedWeight, *, implementation: str, round_x: bool = False
) -> jax.Array:
    """x [..., E] times a weight [F, E] -> float32[..., F], by what `choose` chose."""
    rows = x.reshape(-1, x.shape[-1])
    kernel = xla if implementation == XLA else _kernel(implementation)
    out = kernel.quant_matmul(rows, weight, round_x=round_x)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _kernel(platform: str) -> ModuleType:
    if platform == "tpu":
        from pallas_kernels.quant_matmul import tpu as kernel
    else:
        from pallas_kernels.quant_matmul import gpu as kernel
    return kernel
