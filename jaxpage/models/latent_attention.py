"""Multi-head latent attention: a token has one latent, from which the keys and values of all heads follow, and one
rotated key that all heads share.

DeepSeek-V2, arXiv:2405.04434, section 2.1, and transformers' DeepseekV3Attention, whose names the attributes have. Only
latent and rotated key are kept. The projection of latents to the keys of a head moves to its query, and that to its
values behind the attention (section 2.1.2), which then has one KV head for all query heads. Trainers compute the same.

Letters: T tokens, E model dim, H heads, C and R dims of the latent and of the rotated key, N and V dims of what is not
rotated of a head's query and of its value.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import LatentSizes, ModelConfig
from jaxpage.models.layers import Linear, Normal, RMSNorm, param
from jaxpage.models.rope import Rotation

_NORM_EPS = 1e-6  # of latents, whatever the config says of the other norms


class HeadProjection(nnx.Module):
    """The weight [H*(N+V), C] that maps latents to the keys and values of heads. It is not multiplied by latents."""

    def __init__(self, config: ModelConfig, sizes: LatentSizes):
        self.per_head = (config.num_heads, sizes.plain_dim + sizes.value_dim, sizes.rank)
        self.plain_dim = sizes.plain_dim
        self.weight = param(
            (config.num_heads * self.per_head[1], sizes.rank),
            axes=("heads", "latent"),
            units=(config.num_heads, sizes.rank),
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )

    def of_queries(self, q: jax.Array) -> jax.Array:
        """[..., H, C] of q [..., H, N]: its product with a latent is that of q with the key."""
        keys = self.weight[...].reshape(self.per_head)[:, : self.plain_dim]
        return _by_head("htn,hnc->htc", q, keys)

    def of_latents(self, latents: jax.Array) -> jax.Array:
        """Values [..., H, V] of a latent for each head [..., H, C]."""
        values = self.weight[...].reshape(self.per_head)[:, self.plain_dim :]
        return _by_head("htc,hvc->htv", latents, values)


def _by_head(product: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., H, O] of x [..., H, I] and the weights of heads: float32 sums, rounded to x's dtype."""
    # XLA's CPU back end has no bfloat16 product with heads after tokens.
    rows = jnp.swapaxes(x.reshape(-1, *x.shape[-2:]), 0, 1)
    out = jnp.einsum(product, rows, weight, preferred_element_type=jnp.float32)
    return jnp.swapaxes(out.astype(x.dtype), 0, 1).reshape(*x.shape[:-1], -1)


class LatentAttention(nnx.Module):
    """Projections, norms of latents, RoPE; the attention proper is an argument."""

    def __init__(self, config: ModelConfig, sizes: LatentSizes, index: int):
        self.config, self.sizes, self.index = config, sizes, index
        embed, num_heads = config.hidden_size, config.num_heads
        init, dtype = Normal(config.initializer_range), config.dtype
        linear = partial(Linear, init=init, dtype=dtype)
        norm = partial(RMSNorm, axis="latent", eps=_NORM_EPS, dtype=dtype)
        query_rank, num_outputs = sizes.query_rank, sizes.plain_dim + sizes.rotated_dim

        def queries(num_inputs: int, axis: str) -> Linear:
            shape, units = (num_heads * num_outputs, num_inputs), (num_heads, num_inputs)
            return linear(shape, axes=("heads", axis), units=units, bias=False)

        def latents(size: int) -> Linear:
            return linear((size, embed), axes=("latent", "embed"), bias=config.qkv_bias)

        self.q_proj: Linear | None = None
        self.q_a_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if query_rank is None:
            self.q_proj = nnx.data(queries(embed, "embed"))
        else:
            self.q_a_proj = nnx.data(latents(query_rank))
            self.q_a_layernorm = nnx.data(norm(query_rank))
            self.q_b_proj = nnx.data(queries(query_rank, "latent"))
        self.kv_a_proj_with_mqa = latents(sizes.rank + sizes.rotated_dim)
        self.kv_a_layernorm = norm(sizes.rank)
        self.kv_b_proj = HeadProjection(config, sizes)
        self.o_proj = linear(
            (embed, num_heads * sizes.value_dim),
            axes=("embed", "heads"),
            units=(embed, num_heads),
            bias=config.output_bias,
        )

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        config, sizes = self.config, self.sizes
        heads = self._queries(x).reshape(*x.shape[:-1], config.num_heads, -1)
        plain, rotated = jnp.split(heads, [sizes.plain_dim], axis=-1)
        # [..., 1, C] and [..., 1, R]: of the one KV head
        latent, shared = jnp.split(self.kv_a_proj_with_mqa(x)[..., None, :], [sizes.rank], axis=-1)
        latent = self.kv_a_layernorm(latent)
        interleaved = config.ropes[self.index].interleaved
        rotated, shared = rotation.turn(rotated, shared, interleaved=interleaved)
        out = attention(
            self.index,
            jnp.concatenate([self.kv_b_proj.of_queries(plain), rotated], axis=-1),
            jnp.concatenate([latent, shared], axis=-1),
            latent,
            scale=config.attention_scale,
            window=config.windows[self.index],
            soft_cap=config.attention_soft_cap,
        )
        values = self.kv_b_proj.of_latents(out)
        return self.o_proj(values.reshape(*x.shape[:-1], -1))

    def _queries(self, x: jax.Array) -> jax.Array:
        """[..., H*(N+R)]"""
        if self.q_proj is not None:
            return self.q_proj(x)
        assert self.q_a_proj is not None and self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
