"""Weights of float8_e4m3fn with scales per layer, per output or per block, and the quantisation method "fp8"."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from tests.quantized_checkpoints.format import DTYPES, Array, Format

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448  # the largest float8_e4m3fn


def float8(weight: Array, block: tuple[int, int], scale_dtype: Any) -> tuple[Array, Array, Array]:
    """Quantise float32[F, E], one scale per block of rows and columns.

    Returns float8[F, E], scales [ceil(F / rows), ceil(E / columns)], and the float32[F, E] they mean: values times
    scales, exact if these have 16 bits. The last blocks may be smaller.
    """
    F, E = weight.shape
    rows, columns = math.ceil(F / block[0]), math.ceil(E / block[1])
    sizes = np.zeros((rows * block[0], columns * block[1]), np.float32)
    sizes[:F, :E] = np.abs(weight)
    largest = sizes.reshape(rows, block[0], columns, block[1]).max((1, 3))
    scales = (largest / LARGEST).clip(1e-12).astype(scale_dtype)
    spread = scales.astype(np.float32).repeat(block[0], 0).repeat(block[1], 1)[:F, :E]
    values = (weight / spread).clip(-LARGEST, LARGEST).astype(FLOAT8)
    return values, scales, values.astype(np.float32) * spread


def _tensor(name: str, *, scale_shape: tuple[int, ...], static: bool, **other: Any) -> Format:
    """As AutoFP8 writes it: a scale per layer, and with `static` one of its inputs."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        values, scales, meaning = float8(weight, weight.shape, np.float32)
        tensors = {"weight": values, "weight_scale": scales.reshape(scale_shape)}
        if static:
            tensors["input_scale"] = np.full(scale_shape, 0.03125, np.float32)
        return tensors, meaning

    def config(kept: list[str]) -> dict[str, Any]:
        scheme = "static" if static else "dynamic"
        return {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": kept}

    return Format(f"fp8-{name}", quantize, config, **other)


def _block(name: str, scale_dtype: str) -> Format:
    """As DeepSeek-V3 (float32 scales) and Qwen3 (bfloat16). Despite "inv", weights are multiplied by scales."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        values, scales, meaning = float8(weight, (128, 128), DTYPES[scale_dtype])
        return {"weight": values, "weight_scale_inv": scales}, meaning

    def config(kept: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        }

    return Format(f"fp8-{name}", quantize, config)


FORMATS = (
    _tensor("tensor", scale_shape=(), static=False),
    _tensor("static", scale_shape=(1,), static=True, kv_scales=True),
    _block("block", "bfloat16"),
    _block("block-float32", "float32"),
)
