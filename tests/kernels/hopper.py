"""The interpreter of Mosaic GPU kernels, as tests need it."""

from __future__ import annotations

import numpy as np
import pytest


def interpreter(**options):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(**options)  # pyright: ignore[reportAttributeAccessIssue] (jax 0.10)


def sum_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles are rounded once. NumPy's own order of sums depends on the shape."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(gpu_callbacks, "np", _NumPyThatSumsInFloat64())


def look_for_races_of_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operands are read as a load reads: the interpreter leaves them out when it looks for races."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wgmma = gpu_callbacks.wgmma

    def checked(**operands):
        where = {k: operands[k] for k in ("token", "mesh_location", "thread", "source_info")}
        for side in "ab":
            key, transforms = (
                operands[f"{side}_{what}"] for what in ("allocation_key_as_array", "transforms")
            )
            gpu_callbacks._get(allocation_key_as_array=key, transforms=transforms, **where)
        return wgmma(**operands)

    monkeypatch.setattr(gpu_callbacks, "wgmma", checked)


class _NumPyThatSumsInFloat64:
    """And rounds to what is asked for."""

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)
