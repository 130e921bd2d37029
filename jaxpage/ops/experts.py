"""The experts of a layer for a step: dispatches rows to experts and combines the results. Chooses the implementation of
their matmuls, and shards experts over devices. Knows no model.

Each token makes one row for each of its experts. Rows are sorted by expert, multiplied, and added up by token in the
order of its experts, so a token's result depends on that token alone, whatever shares the batch. Rows of padding have
no expert; they come last and are not multiplied.

Weights may be quantized, as in `ops.matmul`: for int8 weights with a scale for each output, each row is rounded to int8
too, before each matmul, so sums are exact.

On several devices each has X/n experts and all tokens. It multiplies the rows of its own experts; the only
communication is one sum over the devices, [T, E] in the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpage.device import Device
from jaxpage.ops.implementations import (
    Choice,
    Implementation,
    first_supported,
    on_hopper,
    require,
)
from jaxpage.parallel.sharding import EXPERT
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.gradient import gradient
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, round_rows
from pallas_kernels.tile_sizes import Sizes, kernel_of, tuned_sizes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts of a layer. gate_up: the outputs of gate, then those of up; without a gate, these alone."""

    gate_up: jax.Array | QuantizedWeight  # [X, 2 F, E], or [X, F, E]
    down: jax.Array | QuantizedWeight  # [X, E, F]
    gate_up_bias: jax.Array | None = None  # as gate_up, without E
    down_bias: jax.Array | None = None  # [X, E]


Weights = jax.Array | jax.ShapeDtypeStruct | QuantizedWeight


def _rounds_rows(weights: Weights) -> bool:
    return isinstance(weights, QuantizedWeight) and weights.rounds_x


@dataclass(frozen=True)
class ExpertsKernel:
    """The implementation of the matmuls: XLA, or the kernel for "tpu" or "gpu" with the tile sizes of a kind of device.

    `mesh`: the devices that share the tokens; `divided`: each of them has X/n experts, otherwise all.
    """

    platform: str | None
    sizes: Sizes | None = None
    mesh: Mesh | None = None
    divided: bool = False


XLA = ExpertsKernel(None)


@dataclass(frozen=True, kw_only=True)
class _Need:
    """The weights of one device as shapes, and the dtype of tokens."""

    gate_up: Weights
    down: Weights
    dtype: jnp.dtype
    device: Device

    def products(self) -> Iterator[tuple[jax.ShapeDtypeStruct, Weights]]:
        """Rows and weights of the matmuls."""
        for weights in (self.gate_up, self.down):
            dtype = jnp.int8 if _rounds_rows(weights) else self.dtype
            yield jax.ShapeDtypeStruct((1, weights.shape[2]), dtype), weights


def _accept_kernel(need: _Need) -> ExpertsKernel:
    platform = need.device.platform
    for rows, weights in need.products():
        require(kernel_of("grouped_matmul", platform).unsupported_reason(rows, weights))
    return ExpertsKernel(platform, tuned_sizes("grouped_matmul", platform, need.device.kind))


IMPLEMENTATIONS: tuple[Implementation[_Need, ExpertsKernel], ...] = (
    Implementation("tpu", "tpu", _accept_kernel),
    Implementation("hopper", "gpu", on_hopper(_accept_kernel)),
    Implementation("xla", None, lambda need: XLA),
)


def choose(
    gate_up: Weights,
    down: Weights,
    device: Device,
    *,
    mesh: Mesh | None = None,
    divided: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
) -> Choice[ExpertsKernel]:
    """The implementation of matmuls of tokens of `dtype` with such weights, those of one device, as arrays or shapes.

    `mesh`: the devices that share the tokens; `divided`: each of them has the same number of experts.
    """
    need = _Need(gate_up=gate_up, down=down, dtype=jnp.dtype(dtype), device=device)
    choice = first_supported("grouped_matmul", IMPLEMENTATIONS, need, device.platform)
    return replace(choice, chosen=replace(choice.chosen, mesh=mesh, divided=divided))


def experts(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    *,
    activation: Callable[[jax.Array], jax.Array],
    kernel: ExpertsKernel,
) -> jax.Array:
    """float32[T, E]: for each token the sum of share * down(activation(gate_up(token))) over its experts.

    chosen: int32[T, k], X for a token without an expert. shares: float32[T, k]. activation: float32[T, 2 F], or [T, F]
    without a gate, -> [T, F], hashable. `kernel` is the result of `choose`.
    """
    apply = partial(_apply, activation=activation, kernel=replace(kernel, mesh=None))
    if kernel.mesh is None or kernel.mesh.size == 1:
        return apply(x, chosen, shares, weights, jnp.int32(0))

    def apply_own(x, chosen, shares, weights):
        if not kernel.divided:
            return apply(x, chosen, shares, weights, jnp.int32(0))
        first = lax.axis_index(EXPERT) * weights.gate_up.shape[0]
        # In the dtype of hidden states, like the sum of an MLP's output.
        part = apply(x, chosen, shares, weights, first).astype(x.dtype)
        return lax.psum(part, EXPERT).astype(jnp.float32)

    by_expert = P(EXPERT) if kernel.divided else P()
    return jax.shard_map(
        apply_own,
        mesh=kernel.mesh,
        in_specs=(P(), P(), P(), by_expert),
        out_specs=P(),
        check_vma=False,
    )(x, chosen, shares, weights)


# A separate jit, so that it is traced and lowered once for all equal layers; XLA inlines it.
@partial(jax.jit, static_argnames=("activation", "kernel"))
def _apply(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    first: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    kernel: ExpertsKernel,
) -> jax.Array:
    """`experts`, where `weights` has only the experts from `first` on; the others add nothing."""
    (num_tokens, num_chosen), num_own = chosen.shape, weights.gate_up.shape[0]
    own = (chosen >= first) & (chosen < first + num_own)
    expert = jnp.where(own, chosen - first, num_own).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    group_sizes = (expert[:, None] == jnp.arange(num_own, dtype=jnp.int32)[None]).sum(
        axis=0, dtype=jnp.int32
    )
    expert = expert[order]
    product = partial(_product, group_sizes=group_sizes, kernel=kernel)
    hidden = product(x[order // num_chosen], weights.gate_up)
    hidden = activation(_with_bias(hidden, weights.gate_up_bias, expert)).astype(x.dtype)
    out = _with_bias(product(hidden, weights.down), weights.down_bias, expert)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    # By choice, then by token: of [T, k, E] a TPU would move all k to take one.
    out = out[back.reshape(num_tokens, num_chosen).T]
    parts = [shares[:, i, None] * out[i] for i in range(num_chosen)]
    total = parts[0]
    for part in parts[1:]:  # one after the other: another order would change the last bits
        total = total + part
    return total


def _with_bias(out: jax.Array, bias: jax.Array | None, expert: jax.Array) -> jax.Array:
    """Add each row's bias; rows without an expert stay 0."""
    if bias is None:
        return out
    return out + bias.at[expert].get(mode="fill", fill_value=0).astype(out.dtype)


def _product(
    x: jax.Array,
    weights: jax.Array | QuantizedWeight,
    *,
    group_sizes: jax.Array,
    kernel: ExpertsKernel,
) -> jax.Array:
    """float32[T, F] for rows sorted by expert. Rows without an expert are 0."""
    product = xla.grouped_matmul
    if kernel.platform is not None:
        product = partial(
            kernel_of("grouped_matmul", kernel.platform).grouped_matmul, sizes=kernel.sizes
        )
    if not isinstance(weights, QuantizedWeight):
        return _multiply(x, weights, group_sizes, product)
    if not weights.rounds_x:
        return product(x, weights, group_sizes)
    integers, row_scale = round_rows(x)
    return product(integers, weights, group_sizes, row_scale=row_scale)


def _multiply(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, product: Callable[..., jax.Array]
) -> jax.Array:
    """The grouped matmul, differentiable; see `pallas_kernels/grouped_matmul/reference.py`."""

    @jax.custom_vjp
    def multiply(x, weights, group_sizes):
        return product(x, weights, group_sizes)

    def forward(x, weights, group_sizes):
        return multiply(x, weights, group_sizes), (x, weights, group_sizes)

    def backward(kept, slopes):
        x, weights, group_sizes = kept
        return (*gradient(x, weights, group_sizes, slopes), None)

    multiply.defvjp(forward, backward)
    return jnp.asarray(multiply(x, weights, group_sizes))
