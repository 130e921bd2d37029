"""Named argument sets for products with quantized weights: edge cases, and the layers of models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.quantized import QuantizedWeight, pack, quantize


@dataclass(frozen=True, kw_only=True)
class Case:
    """x [num_tokens, num_in] times a weight [num_out, num_in]."""

    name: str
    num_tokens: int = 8
    num_in: int = 512
    num_out: int = 256
    format: str = "int8"
    group_size: int | None = None  # None: int8 and fp8 have a scale per output
    symmetric: bool = False  # int4 without zeros
    round_x: bool = False
    dtype: str = "bfloat16"


_int4 = partial(Case, format="int4", group_size=128)
_int8_groups = partial(Case, format="int8", group_size=128)
_fp8_groups = partial(Case, format="fp8_e4m3", group_size=128)
SMALL = (
    Case(name="int8"),
    Case(name="int8-one-token", num_tokens=1),
    Case(name="int8-odd-tokens", num_tokens=67, num_out=384, num_in=640),
    Case(name="int8-rounded-x", num_tokens=5, round_x=True),
    _int4(name="int4"),
    _int4(name="int4-one-token", num_tokens=1),
    _int4(name="int4-odd-number-of-groups", num_in=896, num_out=384, num_tokens=19),
    _int4(name="int4-symmetric", symmetric=True),
    _int4(name="int4-groups-of-64", group_size=64),
    _int4(name="int4-groups-of-32", group_size=32),
    Case(name="fp8", format="fp8_e4m3"),
    Case(name="fp8-odd-tokens", format="fp8_e4m3", num_tokens=67, num_in=640),
    _int8_groups(name="int8-groups"),
    _int8_groups(name="int8-groups-many-tokens", num_tokens=200, num_in=640, num_out=384),
    _fp8_groups(name="fp8-groups"),
    _fp8_groups(name="fp8-groups-one-token", num_tokens=1),
    _fp8_groups(name="fp8-groups-odd-number", num_in=896, num_out=384, num_tokens=19),
    _fp8_groups(name="fp8-groups-many-tokens", num_tokens=200, num_in=640, num_out=384),
)

# Qwen2.5's linear layers, (in, out): q, k and v; o; gate and up; down.
LAYERS = {
    "0.5b": ((896, 1152), (896, 896), (896, 9728), (4864, 896)),
    "3b": ((2048, 2560), (2048, 2048), (2048, 22016), (11008, 2048)),
    "7b": ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)),
}


def arguments(case: Case, *, seed: int = 0) -> tuple[jax.Array, QuantizedWeight]:
    """x and the weight. Has all values of the format, and rows and groups of very different magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.num_tokens, case.num_in))
    x *= np.exp(rng.standard_normal((case.num_tokens, 1)))
    weight = rng.standard_normal((case.num_out, case.num_in))
    weight *= np.exp(rng.standard_normal((case.num_out, 1)))
    x = jnp.asarray(x, case.dtype)
    if not case.symmetric:
        whole = jnp.asarray(weight, jnp.float32)
        return x, jax.jit(quantize, static_argnums=(1, 2))(whole, case.format, case.group_size)
    assert case.group_size is not None
    q = rng.integers(0, 16, weight.shape, np.uint8)
    scale = np.exp(rng.standard_normal((case.num_in // case.group_size, case.num_out)))
    return x, jax.jit(pack)(jnp.asarray(q), jnp.asarray(scale, jnp.float32))
