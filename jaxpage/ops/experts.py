"""Products of tokens with the weights of their experts: chooses the implementation. No model has experts yet.

Must not know how tokens choose experts, nor how they were sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels.grouped_matmul import xla


def choose(platform: str, x: Any, weights: Any) -> tuple[Callable, str | None]:
    """`grouped_matmul.reference`'s product on "cpu", "gpu" or "tpu", of one device; and why it is XLA's, if the
    platform has a kernel that cannot serve.

    x [T, E] and weights [G, F, E] may be `jax.ShapeDtypeStruct`s. A row's result depends on the row and its expert
    alone, so on the platform and on nothing of the batch.
    """
    if platform == "tpu":
        from pallas_kernels.grouped_matmul import tpu

        return tpu.grouped_matmul, None
    if platform == "gpu":
        from pallas_kernels.grouped_matmul import gpu

        reason = gpu.why_not(x, weights)
        return (xla.grouped_matmul, reason) if reason else (gpu.grouped_matmul, None)
    return xla.grouped_matmul, None
