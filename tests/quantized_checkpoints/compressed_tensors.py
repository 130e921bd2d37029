"""The quantisation method "compressed-tensors", as llm-compressor writes it.

Tensors have outputs first, like a linear layer's weight. Its integers are signed, q - 2^(bits - 1), and so are zeros;
packed ones are unsigned again. A group's zero is stored only if it may differ from 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.quantized_checkpoints.float8 import float8
from tests.quantized_checkpoints.format import DTYPES, Array, Format, Quantize
from tests.quantized_checkpoints.integers import Integers, integers, pack
from tests.quantized_checkpoints.packed import input_order

_TOKENS = {"dynamic": True, "strategy": "token"}
_STATIC = {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
_BY_128 = {"dynamic": True, "strategy": "group", "group_size": 128}


def _arguments(bits: int, kind: str, strategy: str, **other: Any) -> dict[str, Any]:
    """How weights or inputs are quantised, with all the keys that files have."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": None,
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    } | other


def _format(
    name: str,
    quantize: Quantize,
    layout: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    **other: Any,
) -> Format:
    def config(kept: list[str]) -> dict[str, Any]:
        kv = _arguments(8, "float", "tensor") if other.get("kv_scales") else None
        group = {
            "input_activations": inputs,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": kept,
            "kv_cache_scheme": kv,
            "quantization_status": "compressed",
        }

    return Format(f"ct-{name}", quantize, config, **other)


def packed_tensors(made: Integers, bits: int, *, zeros: bool, order: bool) -> dict[str, Array]:
    """As stored in the format "pack-quantized". Zeros are packed along outputs, weights along inputs."""
    F, E = made.q.shape
    tensors = {
        "weight_packed": pack(made.q, bits),  # [F, ceil(E * bits / 32)]
        "weight_scale": made.scales,  # [F, J]
        "weight_shape": np.array([F, E], np.int64),
    }
    if zeros:
        tensors["weight_zero_point"] = pack(made.zeros.T, bits).T  # [ceil(F * bits / 32), J]
    if order:
        tensors["weight_g_idx"] = made.groups  # [E]
    return tensors


def _packed(
    name: str,
    bits: int,
    group_size: int = -1,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: str = "bfloat16",
) -> Format:
    """Integers in words, with inputs that are not quantised."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        made = integers(
            weight,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            scale_dtype=DTYPES[dtype],
            order=input_order(layer, weight.shape[1]) if act_order else None,
        )
        tensors = packed_tensors(made, bits, zeros=not symmetric, order=act_order)
        return tensors, made.dequantized()

    weights = _arguments(
        bits,
        "int",
        "channel" if group_size == -1 else "group",
        symmetric=symmetric,
        group_size=None if group_size == -1 else group_size,
        actorder="group" if act_order else None,
        observer="minmax",
    )
    return _format(name, quantize, "pack-quantized", weights, dtype=dtype)


def _int8(name: str, *, static: bool = False, scale_dtype: str = "bfloat16") -> Format:
    """int8[F, E] with a scale per output. Inputs are quantised too: each token, or all with one `static` scale."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        made = integers(weight, bits=8, symmetric=True, scale_dtype=DTYPES[scale_dtype])
        tensors = {"weight": (made.q - 128).astype(np.int8), "weight_scale": made.scales}
        if static:
            tensors["input_scale"] = np.array([0.03125], DTYPES[scale_dtype])
        return tensors, made.dequantized()

    weights = _arguments(8, "int", "channel", observer="minmax")
    inputs = _arguments(8, "int", **(_STATIC if static else _TOKENS))
    return _format(name, quantize, "int-quantized", weights, inputs)


def _float8(
    name: str,
    strategy: str,
    inputs: dict[str, Any] | None,
    *,
    layout: str = "float-quantized",
    scale_dtype: str = "bfloat16",
    **other: Any,
) -> Format:
    """float8[F, E] with scales [1] (strategy "tensor"), [F, 1] ("channel") or [ceil(F / 128), ceil(E / 128)]."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        F, E = weight.shape
        block = {"tensor": (F, E), "channel": (1, E), "block": (128, 128)}[strategy]
        values, scales, meaning = float8(weight, block, DTYPES[scale_dtype])
        tensors = {
            "weight": values,
            "weight_scale": scales.reshape(1) if strategy == "tensor" else scales,
        }
        if inputs is _STATIC:
            tensors["input_scale"] = np.array([0.03125], DTYPES[scale_dtype])
        return tensors, meaning

    structure = [128, 128] if strategy == "block" else None
    weights = _arguments(8, "float", strategy, block_structure=structure, observer="minmax")
    of_inputs = None if inputs is None else _arguments(8, "float", **inputs)
    return _format(name, quantize, layout, weights, of_inputs, **other)


FORMATS = (
    _packed("w4a16", 4, 128),
    _packed("w4a16-g32", 4, 32, dtype="float16"),
    _packed("w4a16-channel", 4),
    _packed("w4a16-asym", 4, 32, symmetric=False),
    _packed("w4a16-asym-channel", 4, symmetric=False),
    _packed("w4a16-act-order", 4, 32, act_order=True),
    _packed("w8a16", 8, 128),
    _packed("w8a16-channel", 8),
    _packed("w8a16-asym", 8, 32, symmetric=False),
    _int8("w8a8"),
    _int8("w8a8-static", static=True, scale_dtype="float32"),
    _float8("fp8-dynamic", "channel", _TOKENS),
    _float8("fp8-dynamic-float32", "channel", _TOKENS, scale_dtype="float32"),
    _float8("fp8", "tensor", _STATIC, kv_scales=True),
    _float8("fp8-block", "block", _BY_128),
    _float8("fp8-weights", "channel", None, layout="naive-quantized"),
    _float8("fp8-naive", "tensor", _STATIC, layout="naive-quantized"),  # an older name
)
