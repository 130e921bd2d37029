"""Low-rank adapters for a step: chooses the implementation. Knows no model.

Kernels read only the slots that a batch uses; with few tokens, reading adapters is what takes the time. With many
tokens a kernel would read and write the layer's float32 result once more, while XLA fuses that into the layer's own
matmul: steps with more than MOST_TOKENS use XLA. So do layers on several devices, because XLA partitions its matmuls,
and those whose slots together have no more than FEW_COLUMNS of B: a TPU's kernel would read them at once, as XLA does,
and an H200 would at best save 2.4 us, the time of a launch or two, in the widest layer of a 7B model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax

from jaxpage.device import Device
from jaxpage.ops.implementations import (
    Choice,
    Implementation,
    Unsupported,
    first_supported,
    on_hopper,
    require,
)
from pallas_kernels.lora import xla
from pallas_kernels.tile_sizes import kernel_of

MOST_TOKENS = 128
FEW_COLUMNS = 128
Half = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class LoraKernel:
    """The implementation that adds adapters: XLA, or the kernel for "tpu" or "gpu"."""

    platform: str | None


XLA = LoraKernel(None)


@dataclass(frozen=True, kw_only=True)
class _Need:
    a: Half
    b: Sequence[Half]
    num_slots: int
    device: Device
    num_devices: int


def _accept_kernel(need: _Need) -> LoraKernel:
    if need.num_devices > 1:
        raise Unsupported(f"the kernel of adapters is for one device; these are {need.num_devices}")
    a, b, platform = need.a, need.b, need.device.platform
    require(kernel_of("lora", platform).unsupported_reason(a, b, num_slots=need.num_slots))
    return LoraKernel(platform)


IMPLEMENTATIONS: tuple[Implementation[_Need, LoraKernel], ...] = (
    Implementation("tpu", "tpu", _accept_kernel),
    Implementation("hopper", "gpu", on_hopper(_accept_kernel)),
    Implementation("xla", None, lambda need: XLA),
)


def choose(
    a: Half, b: Sequence[Half], device: Device, *, num_slots: int, num_devices: int = 1
) -> Choice[LoraKernel]:
    """The implementation for adapters of the shapes and dtypes of a and b, see `pallas_kernels/lora/reference.py`."""
    if b[0].shape[1] <= FEW_COLUMNS:
        return Choice("xla", XLA)
    need = _Need(a=a, b=b, num_slots=num_slots, device=device, num_devices=num_devices)
    return first_supported("lora", IMPLEMENTATIONS, need, device.platform)


def lora(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: Sequence[jax.Array],
    slots: jax.Array,
    *,
    num_slots: int,
    kernel: LoraKernel,
) -> jax.Array:
    """y + B A x with the adapter in each token's slot: y float32[..., F of all projections], x [..., E], slots
    int32[...]. `kernel` is the result of `choose`.
    """
    if kernel.platform is None or slots.size > MOST_TOKENS:
        return xla.lora(y, x, a, b, slots, num_slots=num_slots)
    rows = (each.reshape(-1, each.shape[-1]) for each in (y, x))
    options = dict(num_slots=num_slots, platform=kernel.platform)
    return _by_kernel(*rows, a, tuple(b), slots.reshape(-1), **options).reshape(y.shape)


# A separate jit, so that it is traced and lowered once for all equal layers; XLA inlines it.
@partial(jax.jit, static_argnames=("num_slots", "platform"))
def _by_kernel(y, x, a, b, slots, *, num_slots: int, platform: str) -> jax.Array:
    return kernel_of("lora", platform).lora(y, x, a, b, slots, num_slots=num_slots)
