"""Matmuls for a step: chooses the implementation. Knows no model.

On several devices a matmul is sharded like its weight: over outputs (q, k, v, gate, up), or over inputs (o, down) with
a sum over the devices. XLA partitions its own matmuls; kernels are sharded here.

For int8 weights with a scale for each output, each row of x is rounded to int8 too. Integer sums are exact, whichever
implementation computes them.
"""

from __future__ import annotations

import math
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
from jaxpage.ops.implementations import (
    Choice,
    Implementation,
    Unsupported,
    first_supported,
    on_hopper,
    require,
)
from pallas_kernels.matmul import xla as matmul_xla
from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.quant_matmul import xla as quant_matmul_xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.tile_sizes import Sizes, kernel_of, tuned_sizes

Weight = QuantizedWeight | jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class MatmulKernel:
    """The implementation of a matmul: XLA, or the kernel for "tpu" or "gpu" with the tile sizes of a kind of device.

    `mesh`: the devices that share the weight; `spec` says how its two axes are sharded.
    """

    platform: str | None
    sizes: Sizes | None = None
    mesh: Mesh | None = None
    spec: P = P()

    def serves(self, num_tokens: int) -> bool:
        """Whether the kernel multiplies so many tokens: if its sizes have an `xla_from`, XLA multiplies more."""
        xla_from = getattr(self.sizes, "xla_from", None)
        return self.platform is not None and (xla_from is None or num_tokens < xla_from)


XLA = MatmulKernel(None)
_WHOLE = P()


@dataclass(frozen=True, kw_only=True)
class _Need:
    weight: Weight
    dtype: jnp.dtype  # of x
    device: Device
    mesh: Mesh | None
    spec: P

    @property
    def share(self) -> Any:
        """The weight of one device, as shapes."""
        if self.mesh is None:
            return self.weight
        if not isinstance(self.weight, QuantizedWeight):
            return self._share_of(self.weight, self.spec)
        return jax.tree.map(self._share_of, self.weight, _specs(self.weight, self.spec))

    def _share_of(self, array: Any, spec: P) -> jax.ShapeDtypeStruct:
        assert self.mesh is not None
        shape = NamedSharding(self.mesh, spec).shard_shape(array.shape)
        return jax.ShapeDtypeStruct(shape, array.dtype)


def _accept_quantized(need: _Need) -> MatmulKernel:
    platform, weight = need.device.platform, need.share
    rounds = weight.rounds_x
    require(
        kernel_of("quant_matmul", platform).unsupported_reason(need.dtype, weight, round_x=rounds)
    )
    sizes = tuned_sizes("quant_matmul", platform, need.device.kind)
    return MatmulKernel(platform, sizes, need.mesh, need.spec)


def _accept_unquantized(need: _Need) -> MatmulKernel:
    platform, kind = need.device.platform, need.device.kind
    require(kernel_of("matmul", platform).unsupported_reason(need.dtype, need.share))
    sizes = tuned_sizes("matmul", platform, kind)
    if sizes.xla_from == 1:
        raise Unsupported(
            f"python -m pallas_kernels.matmul.tune has not found the kernel to be faster on {kind}"
        )
    return MatmulKernel(platform, sizes, need.mesh, need.spec)


IMPLEMENTATIONS: dict[str, tuple[Implementation[_Need, MatmulKernel], ...]] = {
    "quant_matmul": (
        Implementation("tpu", "tpu", _accept_quantized),
        Implementation("hopper", "gpu", on_hopper(_accept_quantized)),
        Implementation("xla", None, lambda need: XLA),
    ),
    "matmul": (
        Implementation("hopper", "gpu", on_hopper(_accept_unquantized)),
        Implementation("xla", None, lambda need: XLA),
    ),
}


def choose(
    weight: Weight,
    device: Device,
    *,
    mesh: Mesh | None = None,
    spec: P = _WHOLE,
    dtype: DTypeLike = jnp.bfloat16,
) -> Choice[MatmulKernel]:
    """The implementation of matmuls with x of `dtype`; the weight may be given as shapes and dtypes.

    `spec`: how the weight, or the data of a quantized one, is sharded over `mesh`. Choose once per weight, not for each
    number of tokens: results depend on the choice. A kernel for few tokens leaves more of them to XLA, whose own
    products also round in an order that depends on their number.
    """
    need = _Need(weight=weight, dtype=jnp.dtype(dtype), device=device, mesh=mesh, spec=spec)
    operation = "quant_matmul" if isinstance(weight, QuantizedWeight) else "matmul"
    return first_supported(operation, IMPLEMENTATIONS[operation], need, device.platform)


def matmul(
    x: jax.Array,
    weight: QuantizedWeight | jax.Array,
    *,
    kernel: MatmulKernel = XLA,
    bias: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """x [..., E] times a weight [F, E], plus bias [F]: a float32 sum, rounded to `dtype` [..., F].

    `kernel` is the result of `choose`.
    """
    by_kernel = kernel.serves(math.prod(x.shape[:-1]))
    if isinstance(weight, QuantizedWeight):
        product = quant_matmul_xla.quant_matmul
        if by_kernel:
            product = _of_kernel("quant_matmul", kernel)
        product = partial(product, round_x=weight.rounds_x)
    elif by_kernel:
        product = _of_kernel("matmul", kernel)
    else:
        return matmul_xla.matmul(x, weight, bias=bias, dtype=dtype)
    if by_kernel and kernel.mesh is not None and kernel.mesh.size > 1:
        product = partial(_divided, product, kernel.mesh, kernel.spec)
    out = product(x.reshape(-1, x.shape[-1]), weight, bias=bias, dtype=dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _of_kernel(operation: str, kernel: MatmulKernel) -> Callable[..., jax.Array]:
    module = kernel_of(operation, str(kernel.platform))
    return partial(getattr(module, operation), sizes=kernel.sizes)


def _divided(
    product: Callable[..., jax.Array],
    mesh: Mesh,
    spec: P,
    rows: jax.Array,
    weight: QuantizedWeight | jax.Array,
    *,
    bias: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array:
    """`product` with a share of the weight on each device."""
    outputs, inputs = (*spec, None, None)[:2]
    weight_spec: Any = P(outputs, inputs)
    if isinstance(weight, QuantizedWeight):
        weight_spec = _specs(weight, weight_spec)
        # Rows of x are rounded alike on all devices.
        product = partial(product, axis_name=inputs)

    def of_share(rows: jax.Array, weight: Any, bias: jax.Array | None) -> jax.Array:
        if inputs is None:
            return product(rows, weight, bias=bias, dtype=dtype)
        out = lax.psum(product(rows, weight), inputs)
        return with_bias(out, bias, dtype)

    return jax.shard_map(
        of_share,
        mesh=mesh,
        in_specs=(P(None, inputs), weight_spec, P(outputs)),
        out_specs=P(None, outputs),
        check_vma=False,
    )(rows, weight, bias)


def _specs(weight: QuantizedWeight, spec: P) -> Any:
    """The specs of a weight's arrays, given that of its data."""
    outputs, inputs = (*spec, None, None)[:2]
    of_groups = P(inputs, outputs)
    parts: dict[str, Any] = {
        "data": P(outputs, inputs),
        "scale": of_groups if weight.has_groups else P(outputs),
        "zero": None if weight.zero is None else of_groups,
    }
    return QuantizedWeight(**parts)
