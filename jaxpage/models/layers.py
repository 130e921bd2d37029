"""Parameters, and the small layers that all families share: linear, embedding, norms.

A parameter is declared once, with all its properties: shape, dtype, logical axes, initializer. A new model holds
`jax.ShapeDtypeStruct`s, so it is its own abstract tree and nothing is allocated; `weights` replaces them by arrays.
Must not know families, checkpoints or meshes.

Letters: E model dim, F MLP dim, H and K query and KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.ops import embedding
from jaxpage.ops.matmul import XLA, matmul
from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.quant_matmul.quantized import QuantizedWeight

if TYPE_CHECKING:
    from jaxpage.models.lora import Adapters


@dataclass(frozen=True)
class Normal:
    """Initializer: normal with mean 0."""

    stddev: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        # In float32: a bfloat16 sample has 128 distinct values, none beyond 2.9 standard deviations, and a mean of
        # -0.012 standard deviations; it is no faster.
        return (jax.random.normal(key, shape, jnp.float32) * self.stddev).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """Initializer: one value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        del key
        return jnp.full(shape, self.value, dtype)


@dataclass(frozen=True)
class UniformBytes:
    """Initializer: integers of one byte, all equally likely."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jax.random.bits(key, shape, jnp.uint8).astype(dtype)


Initialiser = Normal | Constant | UniformBytes


def param(
    shape: tuple[int, ...],
    *,
    axes: tuple[str, ...],
    init: Initialiser,
    dtype: jnp.dtype,
    units: tuple[int, ...] | None = None,
) -> nnx.Param:
    """Declare a parameter: an nnx.Param of a ShapeDtypeStruct with metadata `axes`, `units` and `init`.

    axes: the logical axis of each dimension; `parallel.sharding.RULES` maps it to the mesh. units: the number of pieces
    into which each dimension may be divided (heads are not split); default: the shape.
    """
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(struct, axes=axes, units=units or shape, init=init)


class Linear(nnx.Module):
    """y = x W^T + b, with W [out, in] as in Hugging Face checkpoints. The sum is float32, y has x's dtype."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        axes: tuple[str, str],
        units: tuple[int, int] | None = None,
        bias: bool,
        init: Initialiser,
        dtype: jnp.dtype,
    ):
        units = units or shape
        self.weight = param(shape, axes=axes, units=units, init=init, dtype=dtype)
        offset = param(shape[:1], axes=axes[:1], units=units[:1], init=Constant(0.0), dtype=dtype)
        self.bias = offset if bias else None
        # Of quantised weights, as `QuantizedWeight` has them; then `weight` is its data. See `weights.transform`.
        self.scale: nnx.Param | None = None
        self.zero: nnx.Param | None = None
        self.matmul_kernel = XLA
        self.adapters: Adapters | None = None  # see `models.lora`

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The weight if it is quantised, of arrays or shapes."""
        if self.scale is None:
            return None
        return QuantizedWeight(
            data=self.weight.get_value(),
            scale=self.scale.get_value(),
            zero=None if self.zero is None else self.zero.get_value(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        num_out, num_in = (self.quantized or self.weight.get_value()).shape
        return num_out, num_in

    def product(
        self, x: jax.Array, *, bias: jax.Array | None = None, dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        """x W^T, without the layer's own bias: a float32 sum, plus `bias`, rounded to `dtype`."""
        weight = self.quantized or self.weight[...]
        return matmul(x, weight, kernel=self.matmul_kernel, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        if self.adapters is None or self.adapters.slots is None:
            return self.product(x, bias=bias, dtype=x.dtype)
        return with_bias(self.adapters(self.product(x), x), bias, x.dtype)


class Embedding(nnx.Module):
    """A table [V, E], of tokens or what `axis` names; also the head of models with tied embeddings."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        axis: str = "vocab",
        init: Initialiser,
        dtype: jnp.dtype,
    ):
        shape = (vocab_size, hidden_size)
        self.weight = param(shape, axes=(axis, "embed"), init=init, dtype=dtype)
        self.kernel = embedding.XLA

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32[..., T] -> [..., T, E]"""
        return embedding.lookup(self.weight[...], token_ids, kernel=self.kernel)


class RMSNorm(nnx.Module):
    """x / rms(x), back to x's dtype, times the weight (Llama's order of casts)."""

    def __init__(self, size: int, *, axis: str, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = param((size,), axes=(axis,), init=Constant(1.0), dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _like(self.weight[...], x) * normalise(x, self.eps).astype(x.dtype)


# A separate jit, so that it is traced once; XLA inlines it.
@functools.partial(jax.jit, static_argnames="eps")
def normalise(x: jax.Array, eps: float) -> jax.Array:
    """float32 x / sqrt(mean(x^2) + eps) over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _like(vector: jax.Array, x: jax.Array) -> jax.Array:
    """`vector` [E], broadcastable to x [..., E]."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


class OffsetRMSNorm(nnx.Module):
    """x / rms(x) times (1 + weight), all in float32, then back to x's dtype (Gemma's norm)."""

    def __init__(self, size: int, *, axis: str, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = param((size,), axes=(axis,), init=Constant(0.0), dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        factor = 1.0 + _like(self.weight[...], x).astype(jnp.float32)
        return (normalise(x, self.eps) * factor).astype(x.dtype)


class WideRMSNorm(nnx.Module):
    """x / rms(x) times the weight, all in float32, then back to x's dtype (OLMo's order of casts)."""

    def __init__(self, size: int, *, axis: str, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = param((size,), axes=(axis,), init=Constant(1.0), dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = _like(self.weight[...], x).astype(jnp.float32)
        return (weight * normalise(x, self.eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / standard deviation of x, times weight + offset, plus the bias; all in float32, then back to x's
    dtype. weight + offset has the weight's dtype (transformers' NemotronLayerNorm1P).
    """

    def __init__(
        self,
        size: int,
        *,
        axis: str,
        eps: float,
        dtype: jnp.dtype,
        bias: bool = True,
        offset: int = 0,
    ):
        self.eps, self.offset = eps, offset
        self.weight = param((size,), axes=(axis,), init=Constant(1.0 - offset), dtype=dtype)
        shift = param((size,), axes=(axis,), init=Constant(0.0), dtype=dtype)
        self.bias = shift if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = normalise(wide - jnp.mean(wide, axis=-1, keepdims=True), self.eps)
        weight = self.weight[...] + self.offset if self.offset else self.weight[...]
        y *= _like(weight, x).astype(jnp.float32)
        if self.bias is not None:
            y += _like(self.bias[...], x).astype(jnp.float32)
        return y.astype(x.dtype)


NormLayer = RMSNorm | OffsetRMSNorm | WideRMSNorm | LayerNorm
Norm = Callable[..., NormLayer]  # (size, *, axis, eps, dtype)


def times(x: jax.Array, factor: float) -> jax.Array:
    """x * factor in float32, rounded once to x's dtype, as torch multiplies with a number."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_fast": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
