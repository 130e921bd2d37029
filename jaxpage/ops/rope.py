"""Rotary embeddings of a layer's heads: the kernel of a TPU where it can serve a step, else XLA; and shards it.

It is chosen when a program is lowered, by the platform that it is for: what calls it knows of none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.rope import tpu, xla


@dataclass(frozen=True)
class Rotate:
    """How heads are rotated, see `pallas_kernels/rope/reference.py`."""

    # By the kernel where it can serve: it has no gradient, and takes packed tokens only, [T, ..].
    in_step: bool = False
    mesh: Mesh | None = None  # of devices that share the heads

    def __call__(
        self, parts: list[jax.Array], cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
    ) -> list[jax.Array]:
        """Arrays [..., T, heads, D], rotated."""
        options = {"interleaved": interleaved}
        num_devices = 1 if self.mesh is None else self.mesh.size
        # Heads that cannot be divided evenly have padding, of which XLA knows where it lies.
        if not self.in_step or any(x.shape[-2] % num_devices for x in parts):
            return xla.rotate(parts, cos, sin, **options)
        turn = partial(_rotate_packed, **options)
        if self.mesh is not None and num_devices > 1:
            by_head = P(None, TENSOR)
            turn = jax.shard_map(
                turn,
                mesh=self.mesh,
                in_specs=([by_head] * len(parts), P(), P()),
                out_specs=[by_head] * len(parts),
                check_vma=False,
            )
        return turn(parts, cos, sin)

    def split(
        self,
        joined: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        *,
        heads: tuple[int, int, int],
        interleaved: bool = False,
    ) -> list[jax.Array]:
        """q [..., T, H, D], k and v [..., T, K, D] of [..., T, (H + 2 K) * D] on one device; q and k rotated."""
        split = _split_packed if self.in_step else xla.split_and_rotate
        return split(joined, cos, sin, heads=heads, interleaved=interleaved)


# Separate jits, so that they are traced and lowered once for all equal layers; XLA inlines them.
@partial(jax.jit, static_argnames="interleaved")
def _rotate_packed(parts, cos, sin, **options) -> list[jax.Array]:
    heads = [x.shape[1] for x in parts]
    reason = tpu.unsupported_reason(heads, parts[0].shape[2], parts[0].dtype)
    return _on_platform(reason, tpu.rotate, xla.rotate, parts, cos, sin, **options)


@partial(jax.jit, static_argnames=("heads", "interleaved"))
def _split_packed(joined, cos, sin, *, heads, **options) -> list[jax.Array]:
    reason = tpu.unsupported_reason(heads, joined.shape[1] // sum(heads), joined.dtype)
    split = tpu.split_and_rotate, xla.split_and_rotate
    return _on_platform(reason, *split, joined, cos, sin, heads=heads, **options)


def _on_platform(reason: str | None, kernel: Callable, by_xla: Callable, *args: Any, **options):
    if reason:
        return by_xla(*args, **options)
    return lax.platform_dependent(
        *args, tpu=partial(kernel, **options), default=partial(by_xla, **options)
    )
