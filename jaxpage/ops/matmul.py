"""Matmuls with quantised weights for a step: chooses the implementation. Knows no model.

On several devices a matmul is sharded like its weight: over outputs (q, k, v, gate, up), or over inputs (o, down) with
a sum over the devices. XLA partitions its own matmuls; kernels are sharded here.

For int8 weights each row of x is rounded to int8 too. Integer sums are exact, whichever implementation computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpage.device import Device
from jaxpage.ops.implementations import Choice, Implementation, first_supported, on_hopper, require
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, with_bias
from pallas_kernels.tile_sizes import Sizes, kernel_of, tuned_sizes


@dataclass(frozen=True)
class MatmulKernel:
    """The implementation of a matmul: XLA, or the kernel for "tpu" or "gpu" with the tile sizes of a kind of device.

    `mesh`: the devices that share the weight; `spec` says how its two axes are sharded.
    """

    platform: str | None
    sizes: Sizes | None = None
    mesh: Mesh | None = None
    spec: P = P()


XLA = MatmulKernel(None)
_WHOLE = P()


@dataclass(frozen=True, kw_only=True)
class _Need:
    weight: QuantizedWeight
    dtype: jnp.dtype  # of x
    device: Device
    mesh: Mesh | None
    spec: P

    @property
    def share(self) -> QuantizedWeight:
        """The weight of one device, as shapes."""
        if self.mesh is None:
            return self.weight
        data = NamedSharding(self.mesh, self.spec).shard_shape(self.weight.data.shape)
        scale = NamedSharding(self.mesh, P(*self.spec[:1])).shard_shape(self.weight.scale.shape)
        parts: dict[str, Any] = {
            "data": jax.ShapeDtypeStruct(data, self.weight.data.dtype),
            "scale": jax.ShapeDtypeStruct(scale, self.weight.scale.dtype),
        }
        return QuantizedWeight(**parts)


def _accept_kernel(need: _Need) -> MatmulKernel:
    platform, weight = need.device.platform, need.share
    rounds = _rounds_x(weight)
    require(
        kernel_of("quant_matmul", platform).unsupported_reason(need.dtype, weight, round_x=rounds)
    )
    sizes = tuned_sizes("quant_matmul", platform, need.device.kind)
    return MatmulKernel(platform, sizes, need.mesh, need.spec)


IMPLEMENTATIONS: tuple[Implementation[_Need, MatmulKernel], ...] = (
    Implementation("tpu", "tpu", _accept_kernel),
    Implementation("hopper", "gpu", on_hopper(_accept_kernel)),
    Implementation("xla", None, lambda need: XLA),
)


def choose(
    weight: QuantizedWeight,
    device: Device,
    *,
    mesh: Mesh | None = None,
    spec: P = _WHOLE,
    dtype: DTypeLike = jnp.bfloat16,
) -> Choice[MatmulKernel]:
    """The implementation of matmuls with x of `dtype`; the weight may be given as shapes and dtypes.

    `spec`: how the weight, which must be int8 then, is sharded over `mesh`. Choose once per weight, not for each number
    of tokens: results depend on the choice.
    """
    need = _Need(weight=weight, dtype=jnp.dtype(dtype), device=device, mesh=mesh, spec=spec)
    return first_supported("quant_matmul", IMPLEMENTATIONS, need, device.platform)


def quant_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    kernel: MatmulKernel,
    bias: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """x [..., E] times a weight [F, E], plus bias [F]: a float32 sum, rounded to `dtype` [..., F].

    `kernel` is the result of `choose`.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = partial(xla.quant_matmul, round_x=_rounds_x(weight))
    if kernel.platform is not None:
        of_kernel = kernel_of("quant_matmul", kernel.platform).quant_matmul
        product = partial(of_kernel, round_x=_rounds_x(weight), sizes=kernel.sizes)
        if kernel.mesh is not None and kernel.mesh.size > 1:
            product = partial(_divided, product, kernel.mesh, kernel.spec)
    out = product(rows, weight, bias=bias, dtype=dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _divided(
    product: Callable[..., jax.Array],
    mesh: Mesh,
    spec: P,
    rows: jax.Array,
    weight: QuantizedWeight,
    *,
    bias: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array:
    """`product` with a share of the weight on each device."""
    outputs, inputs = (*spec, None, None)[:2]

    def of_share(rows: jax.Array, weight: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
        if inputs is None:
            return product(rows, weight, bias=bias, dtype=dtype)
        out = lax.psum(product(rows, weight, axis_name=inputs), inputs)
        return with_bias(out, bias, dtype)

    parts: dict[str, Any] = {"data": P(outputs, inputs), "scale": P(outputs)}
    return jax.shard_map(
        of_share,
        mesh=mesh,
        in_specs=(P(None, inputs), QuantizedWeight(**parts), P(outputs)),
        out_specs=P(None, outputs),
        check_vma=False,
    )(rows, weight, bias)


def _rounds_x(weight: QuantizedWeight) -> bool:
    return weight.format == "int8"
