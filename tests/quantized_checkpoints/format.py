"""What a format is.

A layer is y = x Wᵀ with W of shape [F, E]: E inputs, F outputs. J groups of inputs share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# Of a layer's name and its float32[F, E]: the tensors stored under that name, and the float32[F, E] that they mean.
Quantize = Callable[[str, Array], tuple[dict[str, Array], Array]]


@dataclass(frozen=True)
class Format:
    """One way of storing quantised weights.

    `config` makes `quantization_config` of the names of layers that stay float, `lm_head` among them if it does; it is
    written to `config_file`. `dtype` is that of tensors that are not quantised. With `kv_scales` every attention gets
    `k_scale` and `v_scale`, scales of a float8 KV cache; with `zero_biases` every quantised layer without a bias gets
    one of zeros.
    """

    name: str
    quantize: Quantize
    config: Callable[[list[str]], dict[str, Any]]
    dtype: str = "bfloat16"
    config_file: str = "config.json"
    kv_scales: bool = False
    zero_biases: bool = False
