"""A mixture of experts instead of an MLP: a router chooses experts for each token, and their outputs are added up.

Attribute paths are the names of the modules in transformers 5, with the weights of all experts stacked; `sources` has
their places in checkpoints. Knows no family, and not how rows are grouped by expert: that is `ops.experts`.

Letters: T tokens, E model dim, F MLP dim of an expert, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ExpertsConfig, ModelConfig
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Constant, Linear, Normal, param
from jaxpage.models.router import Router
from jaxpage.ops.experts import XLA, ExpertsKernel, ExpertWeights, experts
from pallas_kernels.quant_matmul.quantized import QuantizedWeight


@dataclass(frozen=True)
class Gate:
    """activation(gate) * up; with a limit gpt-oss's function, see `ExpertsConfig`."""

    activation: str
    limit: float | None
    slope: float

    def __call__(self, gate_up: jax.Array) -> jax.Array:
        """[T, 2 F] -> [T, F]"""
        gate, up = jnp.split(gate_up, 2, axis=-1)
        if self.limit is None:
            return ACTIVATION_FUNCTIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(gate * self.slope) * (up + 1)


@dataclass(frozen=True)
class NoGate:
    """activation(up)"""

    activation: str

    def __call__(self, up: jax.Array) -> jax.Array:
        """[T, F] -> [T, F]"""
        return ACTIVATION_FUNCTIONS[self.activation](up)


class Experts(nnx.Module):
    """The stacked weights of a layer's experts. `gate_up_proj` has the rows of gate, if any, then those of up."""

    def __init__(self, config: ModelConfig, settings: ExpertsConfig):
        num, inner = settings.num_experts, settings.intermediate_size
        embed = settings.latent_size or config.hidden_size
        init, dtype = Normal(config.initializer_range), config.dtype

        def weight(*shape: int) -> nnx.Param:
            return param(
                (num, *shape), axes=("experts", "expert", "expert"), init=init, dtype=dtype
            )

        def bias(size: int) -> nnx.Param | None:
            if not settings.bias:
                return None
            axes = ("experts", "expert")
            return param((num, size), axes=axes, init=Constant(0.0), dtype=dtype)

        rows = 2 * inner if settings.has_gate else inner
        self.gate_up_proj, self.gate_up_proj_bias = weight(rows, embed), bias(rows)
        self.down_proj, self.down_proj_bias = weight(embed, inner), bias(embed)
        # Of quantised weights, as `QuantizedWeight` has them; then the parameters above are their data.
        self.gate_up_proj_scale: nnx.Param | None = None
        self.gate_up_proj_zero: nnx.Param | None = None
        self.down_proj_scale: nnx.Param | None = None
        self.down_proj_zero: nnx.Param | None = None

    @property
    def weights(self) -> ExpertWeights:
        """Of arrays or shapes."""
        return ExpertWeights(
            gate_up=_weight(self.gate_up_proj, self.gate_up_proj_scale, self.gate_up_proj_zero),
            down=_weight(self.down_proj, self.down_proj_scale, self.down_proj_zero),
            gate_up_bias=_value(self.gate_up_proj_bias),
            down_bias=_value(self.down_proj_bias),
        )


def _weight(
    data: nnx.Param, scale: nnx.Param | None, zero: nnx.Param | None
) -> jax.Array | QuantizedWeight:
    if scale is None:
        return data.get_value()
    return QuantizedWeight(data=data.get_value(), scale=_value(scale), zero=_value(zero))


def _value(parameter: nnx.Param | None) -> Any:
    """The array or shape; without the groups that `weights.transform` adds for a TPU."""
    if parameter is None:
        return None
    value, num_groups = parameter.get_value(), parameter.get_metadata().get("num_groups")
    if num_groups is None:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(shape=(value.shape[0], num_groups, value.shape[2]))
    # XLA's layout on a TPU is the same with and without padding, so this moves nothing.
    return value[:, :num_groups]


def _latent_projection(config: ModelConfig, shape: tuple[int, int]) -> Linear:
    """A projection to or from what experts read and write. Each device has all of it."""
    init, bias = Normal(config.initializer_range), config.mlp_bias
    return Linear(shape, axes=("embed", "embed"), bias=bias, init=init, dtype=config.dtype)


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a token's experts, plus the expert for all tokens, if there is one."""

    def __init__(self, config: ModelConfig, settings: ExpertsConfig, shared: nnx.Module | None):
        self.settings = settings
        gate = Gate(config.activation, settings.swiglu_limit, settings.swiglu_slope)
        self.activation = gate if settings.has_gate else NoGate(config.activation)
        self.gate = Router(config, settings)
        self.experts = Experts(config, settings)
        # transformers has the plural where there is no gate; either is one MLP.
        gated = shared if settings.shared_gate else None
        self.shared_experts = None if settings.shared_gate else shared
        self.shared_expert, self.shared_expert_gate = gated, None
        if gated is not None:
            init, axes = Normal(config.initializer_range), ("router", "embed")
            gate = Linear(
                (1, config.hidden_size), axes=axes, bias=False, init=init, dtype=config.dtype
            )
            self.shared_expert_gate = nnx.data(gate)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if settings.latent_size is not None:
            inner, outer = settings.latent_size, config.hidden_size
            self.fc1_latent_proj = nnx.data(_latent_projection(config, (inner, outer)))
            self.fc2_latent_proj = nnx.data(_latent_projection(config, (outer, inner)))
        # Set by `weights.transform`.
        self.kernel: ExpertsKernel = XLA

    def __call__(
        self,
        x: jax.Array,
        is_token: jax.Array | None = None,
        load: list[jax.Array] | None = None,
        *,
        router_input: jax.Array | None = None,
    ) -> jax.Array:
        """[..., T, E]. is_token: bool[..., T]; the others are padding, which no expert computes. `load`: see
        `ForwardInput.expert_load`. router_input: [..., T, E], x by default.
        """
        rows = x.reshape(-1, x.shape[-1])
        chosen, shares = self.gate.choose(
            rows if router_input is None else router_input.reshape(rows.shape)
        )
        if is_token is not None:
            chosen = jnp.where(is_token.reshape(-1, 1), chosen, self.settings.num_experts)
        if load is not None:
            numbers = jnp.arange(self.settings.num_experts, dtype=chosen.dtype)
            load.append((chosen[..., None] == numbers[None, None]).sum((0, 1), dtype=jnp.int32))
        out = experts(
            rows if self.fc1_latent_proj is None else self.fc1_latent_proj(rows),
            chosen,
            shares,
            self.experts.weights,
            activation=self.activation,
            kernel=self.kernel,
        )
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out.astype(x.dtype)).astype(jnp.float32)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            share = jax.nn.sigmoid(self.shared_expert_gate.product(rows))
            out = out + share * self.shared_expert(rows).astype(jnp.float32)
        if self.shared_experts is not None:
            out = out + self.shared_experts(rows).astype(jnp.float32)
        return out.astype(x.dtype).reshape(x.shape)
