"""What a device is, as data: block sizes, limits and the choice of kernels follow from it.

Knows jax's names of devices and nothing of what runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device; those of a mesh are all alike. A description, not a handle: it may be of a device that is absent."""

    platform: str  # jax's: "cpu", "gpu" or "tpu"
    kind: str = ""  # jax's name of it: "NVIDIA H200", "TPU v6 lite"
    compute_capability: str | None = None  # of GPUs: "9.0"
    memory_bytes: int | None = None  # that programs can use; None: unknown

    @classmethod
    def of(cls, device: jax.Device, *, memory_bytes: int | None = None) -> Device:
        """Describe a device that is present, or one in a topology that is compiled for.

        A topology does not know its memory: pass `memory_bytes`, which is asked of the device otherwise.
        """
        if memory_bytes is None:
            memory_bytes = (device.memory_stats() or {}).get("bytes_limit")
        return cls(
            platform=device.platform,
            kind=device.device_kind,
            compute_capability=getattr(device, "compute_capability", None),
            memory_bytes=memory_bytes,
        )
