"""Layers with a recurrent state: Gated DeltaNet (https://arxiv.org/abs/2412.06464), of Qwen3.5 and Qwen3-Next.

Attribute paths are the checkpoint's names, but what it has in one projection of q, k and v, and more in Qwen3-Next, are
several here: a device of several has some heads of each.

Letters: T tokens, E model dim, N key heads, J value heads for each, D key dim, F value dim, W taps.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig
from jaxpage.models.layers import Constant, Linear, Normal, RMSNorm, param
from jaxpage.models.recurrence import Recurrence
from jaxpage.ops.delta_rule import to_tokens


class Convolutions(nnx.Module):
    """The taps of each channel of q, k and v."""

    def __init__(self, config: ModelConfig, keys: int, values: int):
        """keys, values: number of channels."""
        sizes = config.recurrent
        assert sizes is not None

        def taps(num_channels: int) -> nnx.Param:
            return param(
                (num_channels, 1, sizes.num_taps),
                axes=("heads", "taps", "taps"),
                units=(sizes.num_key_heads, 1, sizes.num_taps),
                init=Normal(config.initializer_range),
                dtype=config.dtype,
            )

        self.q, self.k, self.v = taps(keys), taps(keys), taps(values)

    @property
    def taps(self) -> list[jax.Array]:
        """[channels, W] each."""
        return [each[...][:, 0] for each in (self.q, self.k, self.v)]


class GatedDeltaNet(nnx.Module):
    """Projections, a convolution, the gated delta rule, a gated norm (transformers' Qwen3_5GatedDeltaNet and
    Qwen3NextGatedDeltaNet).
    """

    def __init__(self, config: ModelConfig, index: int):
        assert config.recurrent is not None
        self.config, self.index = config.recurrent, index
        sizes, embed, dtype = self.config, config.hidden_size, config.dtype
        num_heads, num_values = sizes.num_key_heads, sizes.num_value_heads
        init = Normal(config.initializer_range)

        def projection(num_out: int) -> Linear:
            return Linear(
                (num_out, embed),
                axes=("heads", "embed"),
                units=(num_heads, embed),
                bias=False,
                init=init,
                dtype=dtype,
            )

        def of_values(value: float) -> nnx.Param:
            return param(
                (num_values,),
                axes=("heads",),
                units=(num_heads,),
                init=Constant(value),
                dtype=jnp.dtype(jnp.float32),
            )

        keys, values = num_heads * sizes.key_dim, num_values * sizes.value_dim
        self.in_proj_q, self.in_proj_k = projection(keys), projection(keys)
        self.in_proj_v, self.in_proj_z = projection(values), projection(values)
        self.in_proj_b, self.in_proj_a = projection(num_values), projection(num_values)
        # Joined, see `weights.transform`. Checkpoints quantise the former only.
        self.in_proj_qkvz: Linear | None = None
        self.in_proj_ba: Linear | None = None
        self.conv = Convolutions(config, keys, values)
        self.A_log, self.dt_bias = of_values(0.0), of_values(1.0)
        self.norm = RMSNorm(sizes.value_dim, axis="head_dim", eps=config.norm_eps, dtype=dtype)
        self.out_proj = Linear(
            (embed, values),
            axes=("embed", "heads"),
            units=(embed, num_heads),
            bias=False,
            init=init,
            dtype=dtype,
        )

    @property
    def joined_projections(self) -> dict[str, dict[str, int]]:
        """Name of a joined projection -> its parts and their outputs, in order."""
        sizes = self.config
        keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
        qkvz = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
        ba = {"in_proj_b": sizes.num_value_heads, "in_proj_a": sizes.num_value_heads}
        return {"in_proj_qkvz": qkvz, "in_proj_ba": ba}

    def __call__(self, x: jax.Array, recurrence: Recurrence) -> jax.Array:
        """[..., T, E] of x [..., T, E]"""
        sizes = self.config
        q, k, v, z, b, a = self._projected(x)
        mixed = recurrence.convolve(self.index, (q, k, v), self.conv.taps)
        q, k, v = (jax.nn.silu(part).astype(x.dtype) for part in mixed)
        heads = (*x.shape[:-1], sizes.num_key_heads, sizes.values_per_key)
        shift, rate = (
            jnp.expand_dims(each[...].astype(jnp.float32), range(x.ndim - 1))
            for each in (self.dt_bias, self.A_log)
        )
        log_decay = -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + shift)
        keys = (*heads[:-1], sizes.key_dim)
        tokens = to_tokens(
            q.reshape(keys),
            k.reshape(keys),
            v.reshape(*heads, sizes.value_dim),
            log_decay.reshape(heads),
            jax.nn.sigmoid(b.reshape(heads)),
        )
        out = recurrence.advance(self.index, tokens)
        gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
        normed = self.norm(out.astype(x.dtype)).astype(jnp.float32)
        out = (normed * gate).astype(x.dtype)
        return self.out_proj(out.reshape(*x.shape[:-1], -1))

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """q, k, v, z, b, a"""
        found: list[jax.Array] = []
        for name, parts in self.joined_projections.items():
            joined = getattr(self, name)
            if joined is None:
                found += [getattr(self, part)(x) for part in parts]
            else:
                ends = list(itertools.accumulate(parts.values()))[:-1]
                found += jnp.split(joined(x), ends, axis=-1)
        return found
