"""Products of tokens with the weights of their experts: chooses the implementation. No model has experts yet.

Must not know how tokens choose experts, nor how they were sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.tune import kernel_of, tuned_sizes
from pallas_kernels.hopper import unsupported_reason_on


def choose(
    platform: str,
    x: Any,
    weights: Any,
    *,
    device_kind: str = "",
    compute_capability: str | None = None,
) -> tuple[Callable, str | None]:
    """`grouped_matmul.reference`'s product on "cpu", "gpu" or "tpu", of one device; and why it is XLA's, if the
    platform has a kernel that cannot serve.

    x [T, E] and weights [G, F, E] may be `jax.ShapeDtypeStruct`s. device_kind and, of GPUs, compute_capability, as jax
    tells them: "NVIDIA H200", "9.0". A row's result depends on the row and its expert alone, so on the platform and on
    nothing of the batch.
    """
    if platform not in ("tpu", "gpu"):
        return xla.grouped_matmul, None
    kernel, reason = kernel_of(platform), None
    if platform == "gpu":
        reason = unsupported_reason_on(compute_capability) or kernel.unsupported_reason(x, weights)
    if reason:
        return xla.grouped_matmul, reason
    return partial(kernel.grouped_matmul, sizes=tuned_sizes(platform, device_kind)), None
