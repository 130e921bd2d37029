"""Rotary position embeddings: the frequencies of every RoPE type, and the rotation.

Formulas and their float32 order of operations: transformers `modeling_rope_utils.py`. Must not know
layers.

A rotation depends on nothing but the position, so that chunking, caching and batching cannot change
an answer. transformers picks the frequencies of `dynamic` and `longrope` by the length of the
current input; here they are chosen once, by `max_model_len` (vLLM does so for `longrope`): the
frequencies that transformers would use for an input of `max_model_len` tokens. The two agree on
every input if `max_model_len` is at most the length of pretraining, and on inputs of exactly
`max_model_len` tokens (`longrope`: on all inputs longer than pretraining) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.rope import Rotate
from pallas_kernels.rope.reference import split

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Rope:
    """Frequencies of one kind of RoPE; the first `2 * len(inv_freq)` of the head's dimensions are
    rotated.
    """

    inv_freq: tuple[float, ...]  # radians per position, float32 values
    scale: float = 1.0  # factor on cos and sin (yarn, longrope)
    # For each frequency, which of a token's three positions (time, height, width) turns it: multimodal RoPE of
    # transformers' Qwen2-VL ("mrope_section"). None: tokens have one position.
    sections: tuple[int, ...] | None = None
    kind: str = "default"  # transformers' rope_type; trainers may store projections by it
    interleaved: bool = False  # pairs of dimensions are neighbours
    # Rotated queries are multiplied by 1 + query_growth * log(1 + floor(position / query_length)): Llama 4's scaling
    # (transformers' get_llama_4_attn_scale).
    query_growth: float = 0.0
    query_length: int = 1

    def arrays(
        self, positions: jax.Array, dtype: jnp.dtype, *, three: bool = False
    ) -> tuple[jax.Array, ...]:
        """cos and sin, see `angles`, and if queries are scaled their factors, dtype[..., T, 1, 1]."""
        cos, sin = self.angles(positions, dtype, three=three)
        if not self.query_growth:
            return cos, sin
        lengths = (positions[0] if three else positions) // self.query_length
        factors = 1 + self.query_growth * jnp.log1p(lengths.astype(jnp.float32))
        return cos, sin, factors.astype(dtype)[..., None, None]

    def angles(
        self, positions: jax.Array, dtype: jnp.dtype, *, three: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """cos and sin, each dtype[..., T, 1, len(inv_freq)], computed in float32.

        positions: int32[..., T]; `three`: int32[3, ..., T], of which a Rope without sections reads the first.
        """
        inv_freq = jnp.asarray(np.array(self.inv_freq, np.float32))
        inv_freq = jnp.expand_dims(inv_freq, range(positions.ndim + 1 - three))
        if not three:
            turned = positions[..., None, None]
        elif self.sections is None:
            turned = positions[0][..., None, None]
        else:
            turned = jnp.moveaxis(positions, 0, -1)[..., None, np.array(self.sections)]
        angles = turned.astype(jnp.float32) * inv_freq
        cos, sin = jnp.cos(angles) * self.scale, jnp.sin(angles) * self.scale
        return cos.astype(dtype), sin.astype(dtype)


NO_ROPE = Rope((), kind="none")  # of layers that do not know positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """What turns the heads of a layer, and by how much."""

    cos: jax.Array  # [..., T, 1, half]
    sin: jax.Array  # [..., T, 1, half]
    query_factors: jax.Array | None = None  # [..., T, 1, 1]
    rotate: Rotate = field(default=Rotate(), kw_only=True, metadata={"static": True})

    def turn(self, *heads: jax.Array, interleaved: bool = False) -> Sequence[jax.Array]:
        """q [..., T, H, D] and k [..., T, K, D], or one of them, rotated."""
        if self.cos.shape[-1] == 0:
            return heads
        q, *others = self.rotate(list(heads), self.cos, self.sin, interleaved=interleaved)
        return self._scaled(q), *others

    def split(
        self, joined: jax.Array, heads: tuple[int, int, int], *, interleaved: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q and k, rotated, and v, which are side by side in [..., T, (H + 2 K) * D]. heads: H, K, K."""
        if self.cos.shape[-1] == 0:
            q, k, v = split(joined, heads)
        else:
            q, k, v = self.rotate.split(
                joined, self.cos, self.sin, heads=heads, interleaved=interleaved
            )
        return self._scaled(q), k, v

    def _scaled(self, q: jax.Array) -> jax.Array:
        return q if self.query_factors is None else q * self.query_factors


def interleaved(ropes: Sequence[Rope]) -> tuple[Rope, ...]:
    """The same, turning neighbouring dimensions."""
    return tuple(replace(rope, interleaved=True) for rope in ropes)


def scaled_queries(ropes: Sequence[Rope], parameters: dict[str, Any]) -> tuple[Rope, ...]:
    """The same with the scaling of queries that `rope_parameters` name, if they do."""
    growth = parameters.get("llama_4_scaling_beta")
    if not growth:
        return tuple(ropes)
    length = parameters.get("original_max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"llama_4_scaling_beta needs original_max_position_embeddings in rope_parameters, a positive integer, got "
            f"{length!r}"
        )
    return tuple(replace(rope, query_growth=growth, query_length=length) for rope in ropes)


def only_with_window(ropes: Sequence[Rope], windows: Sequence[int | None]) -> tuple[Rope, ...]:
    """The same, but layers without a window do not know positions."""
    each = zip(ropes, windows, strict=True)
    return tuple(NO_ROPE if window is None else rope for rope, window in each)


def layer_ropes(
    hf: PretrainedConfig,
    layer_types: Sequence[str],
    *,
    head_dim: int | Mapping[str, int],
    max_model_len: int,
) -> tuple[Rope, ...]:
    """The Rope of each layer. `hf.rope_parameters` is one set, or one per layer type (Gemma 3), as may be `head_dim`.

    Adds missing parameters to `hf`, as transformers does when it creates a model.
    """
    if hf.rope_parameters:
        hf.standardize_rope_params()
    parameters = hf.rope_parameters
    nested = any(isinstance(parameters.get(kind), dict) for kind in layer_types)
    ropes = {}
    for kind in dict.fromkeys(layer_types):
        if nested and not isinstance(parameters.get(kind), dict):
            raise ValueError(f"rope_parameters has nothing for {kind} layers; correct config.json")
        chosen = parameters[kind] if nested else parameters
        dim = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = _rope(chosen, hf, dim, max_model_len)
    return tuple(ropes[kind] for kind in layer_types)


def _rope(p: dict[str, Any], hf: PretrainedConfig, head_dim: int, max_model_len: int) -> Rope:
    rope_type = p.get("rope_type", "default")
    if rope_type == "mrope" and "mrope_section" in p:  # as heads of SpecForge have it
        rope_type = "default"
    if rope_type not in _FREQUENCIES:
        raise ValueError(f"rope_type {rope_type!r}; supported are {', '.join(_FREQUENCIES)}")
    dim = int(head_dim * _rotated_part(p, hf))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ValueError(
            f"RoPE would rotate {dim} of {head_dim} dimensions of a head; the number must be even, "
            "2 to head_dim: check partial_rotary_factor and head_dim in config.json"
        )
    lengths = _Lengths(max_model_len, hf.max_position_embeddings)
    try:
        inv_freq, scale = _FREQUENCIES[rope_type](p, dim, lengths)
    except KeyError as missing:
        raise ValueError(f"rope_type {rope_type!r} needs {missing} in rope_parameters") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"rope_parameters {p} of config.json cannot be used: {error}") from None
    frequencies = tuple(inv_freq.astype(np.float32).tolist())
    return Rope(frequencies, float(scale), _sections(p, len(frequencies)), rope_type)


def _rotated_part(p: dict[str, Any], hf: PretrainedConfig) -> float:
    """`partial_rotary_factor`, which a config keeps from any config.json, if models of this kind have it; else 1."""
    theirs = "partial_rotary_factor" in (type(hf)().rope_parameters or {})
    return (theirs and p.get("partial_rotary_factor")) or 1.0


def _sections(p: dict[str, Any], num_frequencies: int) -> tuple[int, ...] | None:
    """`Rope.sections` of `mrope_section`, the number of frequencies that each position turns."""
    counts = p.get("mrope_section")
    if counts is None:
        return None
    if len(counts) != 3 or sum(counts) != num_frequencies:
        raise ValueError(
            f"mrope_section {counts} must be three numbers with the sum {num_frequencies}, half of the "
            "rotated dimensions of a head; correct config.json"
        )
    if not p.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    # Qwen3-VL: height and width take every third frequency, from the second and third on.
    sections = [0] * num_frequencies
    for axis in (1, 2):
        for index in range(axis, min(3 * counts[axis], num_frequencies), 3):
            sections[index] = axis
    return tuple(sections)


@dataclass(frozen=True)
class _Lengths:
    max_model_len: int
    max_position_embeddings: int


_Frequencies = tuple[np.ndarray, float]


def _powers(base: float, dim: int) -> np.ndarray:
    """float32[dim/2]: base ** (0/dim, 2/dim, ...).

    From float32 numbers and rounded once, as torch's power is; NumPy's own float32 power is off by
    up to 2 units in the last place, which at position 100,000 turns a dimension by a hundredth of a
    radian.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float64(np.float32(base)) ** exponents.astype(np.float64)).astype(np.float32)


def frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """`Rope.inv_freq` of `dim` dimensions: 1 / theta ** (0/dim, 2/dim, ...)."""
    return tuple((1 / _powers(theta, dim)).tolist())


def _default(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    return 1 / _powers(p["rope_theta"], dim), 1.0


def _proportional(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    """The first part of the frequencies of the whole head; the others are 0: Gemma 4."""
    num_turned = int(p.get("partial_rotary_factor", 1.0) * dim // 2)
    inv_freq = 1 / _powers(p["rope_theta"], dim) / np.float32(p.get("factor", 1.0))
    return np.where(np.arange(dim // 2) < num_turned, inv_freq, np.float32(0)), 1.0


def _linear(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    return 1 / _powers(p["rope_theta"], dim) / np.float32(p["factor"]), 1.0


def _dynamic(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    factor, trained_len = p["factor"], lengths.max_position_embeddings
    length = max(lengths.max_model_len, trained_len)
    growth = (factor * length / trained_len - (factor - 1)) ** (dim / (dim - 2))
    return 1 / _powers(p["rope_theta"] * growth, dim), 1.0


def _llama3(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    inv_freq = 1 / _powers(p["rope_theta"], dim)
    factor, low, high = (
        np.float32(p[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original_len = np.float32(p["original_max_position_embeddings"])
    wavelen = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(wavelen > original_len / low, inv_freq / factor, inv_freq)
    smooth = (original_len / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelen >= original_len / high) & (wavelen <= original_len / low)
    return np.where(medium, smoothed, scaled), 1.0


def _yarn(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    base, original_len = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p.get("factor") or lengths.max_position_embeddings / original_len

    def correction_dim(rotations: float) -> float:
        """The dimension that turns `rotations` times in `original_len` positions."""
        return dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction_dim(p.get("beta_fast") or 32), correction_dim(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0  # avoids 0/0; the value is transformers'
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp.astype(np.float32)
    powers = _powers(base, dim)
    inv_freq = 1 / (np.float32(factor) * powers) * (1 - keep) + 1 / powers * keep
    return inv_freq, _yarn_scale(p, factor)


def yarn_scale(factor: float, weight: float) -> float:
    """How much larger scores become by a context `factor` times as long (transformers' yarn_get_mscale)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_scale(p: dict[str, Any], factor: float) -> float:
    if p.get("attention_factor") is not None:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_scale(factor, p["mscale"]) / yarn_scale(factor, p["mscale_all_dim"])
    return yarn_scale(factor, 1.0)


def _longrope(p: dict[str, Any], dim: int, lengths: _Lengths) -> _Frequencies:
    original_len = p["original_max_position_embeddings"]
    factor = p.get("factor") or lengths.max_position_embeddings / original_len
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    chosen = "long_factor" if lengths.max_model_len > original_len else "short_factor"
    stretch = p[chosen]
    if len(stretch) != dim // 2:
        raise ValueError(
            f"longrope needs {dim // 2} factors for {dim} dimensions, {chosen} has {len(stretch)}"
        )
    return 1 / (np.array(stretch, np.float32) * _powers(p["rope_theta"], dim)), scale


_FREQUENCIES: dict[str, Callable[[dict[str, Any], int, _Lengths], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
