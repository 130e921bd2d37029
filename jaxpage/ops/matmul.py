"""Products with quantised weights for a step: chooses the implementation. Knows no model.

On several devices a product is divided as its weight is: over outputs (q, k, v, gate, up) or over inputs (o, down),
and the parts are added. XLA divides its own products, and a kernel is divided here.

For int8 weights each row of x is rounded to int8 too: integers are summed exactly, whoever computes them.
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
from jaxpage.ops.implementations import Choice, Implementation, first_supported, require
from pallas_kernels import hopper, tuning
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.quant_matmul.tune import kernel_of, tuned_sizes


@dataclass(frozen=True)
class MatmulKernel:
    """What computes a product: XLA, or the kernel of "tpu" or "gpu" with the tile sizes of a kind of device.

    `mesh`: of devices that share the weight, as `spec` says of its two axes.
    """

    platform: str | None
    sizes: tuning.Sizes | None = None
    mesh: Mesh | None = None
    spec: P = P()


XLA = MatmulKernel(None)
_WHOLE = P()


@dataclass(frozen=True, kw_only=True)
class _Request:
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


def _accept_kernel(request: _Request) -> MatmulKernel:
    platform, weight = request.device.platform, request.share
    rounds = _rounds_x(weight)
    require(kernel_of(platform).unsupported_reason(request.dtype, weight, round_x=rounds))
    sizes = tuned_sizes(platform, request.device.kind)
    return MatmulKernel(platform, sizes, request.mesh, request.spec)


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
    weight: QuantizedWeight,
    device: Device,
    *,
    mesh: Mesh | None = None,
    spec: P = _WHOLE,
    dtype: DTypeLike = jnp.bfloat16,
) -> Choice[MatmulKernel]:
    """What computes products with x of `dtype` there. Of the weight shapes and dtypes suffice.

    `spec`: how the weight, int8 then, is divided over the devices of `mesh`. Ask once for a weight, not for each
    number of tokens: the choice is a part of what its products are.
    """
    request = _Request(weight=weight, dtype=jnp.dtype(dtype), device=device, mesh=mesh, spec=spec)
    return first_supported("quant_matmul", IMPLEMENTATIONS, request, device.platform)


def quant_matmul(x: jax.Array, weight: QuantizedWeight, *, kernel: MatmulKernel) -> jax.Array:
    """x [..., E] times a weight [F, E] -> float32[..., F], by what `choose` chose."""
    rows, rounds = x.reshape(-1, x.shape[-1]), _rounds_x(weight)
    if kernel.platform is None:
        out = xla.quant_matmul(rows, weight, round_x=rounds)
    else:
        product = partial(
            kernel_of(kernel.platform).quant_matmul, round_x=rounds, sizes=kernel.sizes
        )
        if kernel.mesh is not None and kernel.mesh.size > 1:
            product = _divided(product, kernel.mesh, kernel.spec)
        out = product(rows, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _divided(product: Callable[..., jax.Array], mesh: Mesh, spec: P) -> Callable[..., jax.Array]:
    """`product` with a share of the weight on each device."""
    outputs, inputs = (*spec, None, None)[:2]

    def of_share(rows: jax.Array, weight: QuantizedWeight) -> jax.Array:
        if inputs is None:
            return product(rows, weight)
        return lax.psum(product(rows, weight, axis_name=inputs), inputs)

    parts: dict[str, Any] = {"data": P(outputs, inputs), "scale": P(outputs)}
    return jax.shard_map(
        of_share,
        mesh=mesh,
        in_specs=(P(None, inputs), QuantizedWeight(**parts)),
        out_specs=P(None, outputs),
        check_vma=False,
    )


def _rounds_x(weight: QuantizedWeight) -> bool:
    return weight.format == "int8"
