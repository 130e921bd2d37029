"""Layers with a recurrent state: Mamba-2 (https://arxiv.org/abs/2405.21060), as Granite 4 and Nemotron-H have it.

It is linear attention: B are the keys, C the queries, x times its time step the values, and the state decays. Attribute
paths are the checkpoint's names, but what it has in one projection and one convolution is several here: a device of
several has some heads of each.

Letters: T tokens, E model dim, N key heads (groups of B and C), J value heads for each, D key dim (of the state), F
value dim, W taps.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpage.models.config import ModelConfig, counts_of
from jaxpage.models.layers import Constant, Linear, Normal, normalise, param, times
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.recurrent_config import MambaOptions, RecurrentLayers
from jaxpage.models.sources import Place, Source
from pallas_kernels.mamba2.reference import Tokens, of_columns

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MIXED = ("x", "B", "C")  # inputs of the convolution, in the order of its rows in checkpoints


def part_sizes(config: ModelConfig) -> dict[str, int]:
    """Rows of each part of the input projection, in the order of checkpoints."""
    sizes = config.recurrent
    assert sizes is not None
    keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    return {"z": values, "x": values, "B": keys, "C": keys, "dt": sizes.num_value_heads}


def recurrent_layers(
    hf: PretrainedConfig,
    names: tuple[str, str, str, str, str],
    owner: str,
    *,
    layers: tuple[int, ...],
    options: MambaOptions,
) -> RecurrentLayers:
    """The sizes of Mamba-2 in `hf`. names: its options for the numbers of heads and of groups, the dims of the state
    and of a head, and the number of taps. Raises ValueError, which names their `owner`.
    """
    heads, groups, key_dim, value_dim, num_taps = counts_of(hf, names, owner)
    if heads % groups:
        raise ValueError(
            f"{owner}: {heads} heads cannot be in {groups} equal groups; check {names[0]} and {names[1]} in "
            "config.json"
        )
    return RecurrentLayers(
        layers=layers,
        num_key_heads=groups,
        values_per_key=heads // groups,
        key_dim=key_dim,
        value_dim=value_dim,
        num_taps=num_taps,
        mamba=options,
    )


def time_step_limits(hf: PretrainedConfig, owner: str) -> tuple[float, float]:
    """The least and the most time step, `time_step_limit`; without one, none. Raises ValueError, which names its
    `owner`.
    """
    limits = hf.time_step_limit or (0.0, float("inf"))
    if len(limits) != 2 or not all(isinstance(each, int | float) for each in limits):
        raise ValueError(
            f"{owner}: time_step_limit is {limits!r} in config.json; it must be the least and the most time step"
        )
    least, most = limits
    if not least <= most:
        raise ValueError(
            f"{owner}: time_step_limit is {limits!r} in config.json: the least time step is above the most; swap them"
        )
    return float(least), float(most)


def mamba_parts(config: ModelConfig, ours: str, theirs: str) -> dict[str, Place]:
    """The places of a layer's projections and convolutions, of which checkpoints have one each. ours, theirs: its path,
    and its name in checkpoints.
    """
    places: dict[str, Place] = {}
    sizes, start = part_sizes(config), 0
    for part, size in sizes.items():
        for name in ("weight", "bias"):
            place = Source(f"{theirs}.in_proj.{name}", start, start + size)
            places[f"{ours}.in_proj_{part}.{name}"] = place
        start += size
    start = 0
    for part in MIXED:
        for name, suffix in (("weight", ""), ("bias", "_bias")):
            place = Source(f"{theirs}.conv1d.{name}", start, start + sizes[part])
            places[f"{ours}.conv.{part}{suffix}"] = place
        start += sizes[part]
    return places


class Convolutions(nnx.Module):
    """The taps, and perhaps biases, of each channel of x, B and C."""

    def __init__(self, config: ModelConfig):
        sizes, rows = config.recurrent, part_sizes(config)
        assert sizes is not None and sizes.mamba is not None
        units, dtype = (sizes.num_key_heads, 1, sizes.num_taps), config.dtype
        for part in MIXED:
            shape, axes = (rows[part], 1, sizes.num_taps), ("heads", "taps", "taps")
            init = Normal(config.initializer_range)
            setattr(self, part, param(shape, axes=axes, units=units, init=init, dtype=dtype))
            bias = param(shape[:1], axes=axes[:1], units=units[:1], init=Constant(0.0), dtype=dtype)
            setattr(self, f"{part}_bias", bias if sizes.mamba.convolution_bias else None)

    @property
    def taps(self) -> list[jax.Array]:
        """[channels, W] each."""
        return [getattr(self, part)[...][:, 0] for part in MIXED]

    def activated(self, sums: list[jax.Array]) -> list[jax.Array]:
        """SiLU of float32[..., T, channels] each, after the bias."""
        biases = [getattr(self, f"{part}_bias") for part in MIXED]
        return [
            jax.nn.silu(x if bias is None else x + _like(bias, x))
            for x, bias in zip(sums, biases, strict=True)
        ]


class GatedGroupNorm(nnx.Module):
    """x silu(gate), divided by its rms in each group, times the weight, in float32; or x, and the gate afterwards."""

    def __init__(self, config: ModelConfig, size: int, num_groups: int):
        assert config.recurrent is not None and config.recurrent.mamba is not None
        self.eps, self.num_groups = config.norm_eps, num_groups
        self.gates_first = config.recurrent.mamba.norm == "gated"
        units, init = (num_groups,), Constant(1.0)
        self.weight = param((size,), axes=("heads",), units=units, init=init, dtype=config.dtype)

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        if self.gates_first:
            return self._normed(gated(x, gate))
        return gated(self._normed(x), gate)

    def _normed(self, x: jax.Array) -> jax.Array:
        normed = normalise(x.reshape(*x.shape[:-1], self.num_groups, -1), self.eps)
        return normed.reshape(x.shape) * _like(self.weight, x)


def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """float32 x silu(gate)"""
    return x * jax.nn.silu(gate.astype(jnp.float32))


def _of_columns(x: jax.Array, num_columns: int) -> jax.Array:
    """float32[..., V] of what each head has, [..., J]."""
    # To repeat it XLA on TPUs would turn it, and all that it is multiplied with.
    return lax.platform_dependent(
        x,
        tpu=partial(of_columns_by_product, num_columns=num_columns),
        default=partial(of_columns, num_columns=num_columns),
    )


def of_columns_by_product(x: jax.Array, num_columns: int) -> jax.Array:
    """The same bits: a float32 is the sum of three bfloat16, which are multiplied with a one."""
    number = x.shape[-1]
    head = jnp.arange(num_columns) // (num_columns // number)
    is_own = jnp.arange(number)[:, None] == head[None]
    return jnp.matmul(x, is_own.astype(x.dtype), precision=lax.Precision.HIGHEST)


def _like(parameter: nnx.Param, x: jax.Array) -> jax.Array:
    """float32 of a vector, broadcastable to x [..., its size]."""
    return jnp.expand_dims(parameter[...].astype(jnp.float32), range(x.ndim - 1))


class Mamba2(nnx.Module):
    """Projections, a convolution, the recurrence, a gated norm (transformers' GraniteMoeHybridMambaLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        assert config.recurrent is not None and config.recurrent.mamba is not None
        self.config, self.options, self.index = config.recurrent, config.recurrent.mamba, index
        self.rows, num_groups = part_sizes(config), self.config.num_key_heads
        embed, inner, bias = config.hidden_size, self.rows["x"], self.options.projection_bias
        output_bias = bias if self.options.output_bias is None else self.options.output_bias
        init, dtype = Normal(config.initializer_range), config.dtype

        def projection(num_out: int) -> Linear:
            return Linear(
                (num_out, embed),
                axes=("heads", "embed"),
                units=(num_groups, embed),
                bias=bias,
                init=init,
                dtype=dtype,
            )

        def of_heads(value: float) -> nnx.Param:
            shape, init = (self.rows["dt"],), Constant(value)
            return param(shape, axes=("heads",), units=(num_groups,), init=init, dtype=dtype)

        for part, rows in self.rows.items():
            setattr(self, f"in_proj_{part}", projection(rows))
        self.in_proj: Linear | None = None  # joined, see `weights.transform`
        self.conv = Convolutions(config)
        self.A_log, self.dt_bias, self.D = of_heads(0.0), of_heads(1.0), of_heads(1.0)
        has_norm = self.options.norm is not None
        self.norm = GatedGroupNorm(config, inner, num_groups) if has_norm else None
        self.out_proj = Linear(
            (embed, inner),
            axes=("embed", "heads"),
            units=(embed, num_groups),
            bias=output_bias,
            init=init,
            dtype=dtype,
        )

    @property
    def joined_projections(self) -> dict[str, dict[str, int]]:
        """Name of the joined projection -> its parts and their outputs, in order."""
        return {"in_proj": {f"in_proj_{part}": rows for part, rows in self.rows.items()}}

    def __call__(self, x: jax.Array, recurrence: Recurrence) -> jax.Array:
        """[..., T, E] of x [..., T, E]"""
        sizes, lead = self.config, x.shape[:-1]
        gate, values, keys, queries, steps = self._projected(x)
        mixed = recurrence.convolve(self.index, (values, keys, queries), self.conv.taps)
        # Rounded as transformers does, whose convolution has the dtype of the model.
        values, keys, queries = (
            part.astype(x.dtype).astype(jnp.float32) for part in self.conv.activated(mixed)
        )
        of_heads = (*lead, sizes.num_key_heads, sizes.values_per_key)
        of_keys = (*of_heads[:-1], sizes.key_dim)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + _like(self.dt_bias, steps))
        steps = jnp.clip(steps, *self.options.time_steps)
        log_decay = -jnp.exp(_like(self.A_log, steps)) * steps
        # All heads side by side: with an axis of its own for each XLA on TPUs would turn them, and turn them back.
        tokens = Tokens(
            q=queries.reshape(of_keys),
            k=keys.reshape(of_keys),
            v=(values * _of_columns(steps, values.shape[-1])).reshape(*of_keys[:-1], -1),
            log_decay=log_decay.reshape(of_heads),
        )
        skips = of_columns(_like(self.D, log_decay), values.shape[-1])
        out = recurrence.advance(self.index, tokens).reshape(values.shape) + skips * values
        out = (self.norm or gated)(out, gate)
        return self.out_proj(out.astype(x.dtype))

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """z, x, B, C, dt"""
        if self.in_proj is None:
            parts = [getattr(self, f"in_proj_{part}")(x) for part in self.rows]
        else:
            ends = list(itertools.accumulate(self.rows.values()))[:-1]
            parts = jnp.split(self.in_proj(x), ends, axis=-1)
        if self.options.factors is None:
            return parts
        factors = zip(parts, self.options.factors, strict=True)
        return [times(part, factor) for part, factor in factors]
