"""AWQ and GPTQ: integers of four or eight bits, packed along outputs or along inputs, with scales of 16 bits.

AWQ (Lin et al. 2023, arXiv 2306.00978) as AutoAWQ writes it for its "GEMM" kernel, GPTQ (Frantar et al. 2022, arXiv
2210.17323) as AutoGPTQ and GPTQModel do. Tensors have inputs first, unlike a linear layer's weight.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from tests.quantized_checkpoints.format import DTYPES, Array, Format
from tests.quantized_checkpoints.integers import Integers, integers, pack

# Column among the eight of a word, from its lowest four bits to its highest.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(values: Array) -> Array:
    """int32[..., N / 8] of int[..., N] in 0 .. 15."""
    by_word = values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER]
    return pack(by_word.reshape(values.shape), 4)


def awq_tensors(made: Integers) -> dict[str, Array]:
    """As stored."""
    return {
        "qweight": pack_awq(made.q.T),  # [E, F / 8]
        "qzeros": pack_awq(made.zeros.T),  # [J, F / 8]
        "scales": made.scales.T,  # [J, F]
    }


def _awq(group_size: int) -> Format:
    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        made = integers(
            weight, bits=4, group_size=group_size, symmetric=False, scale_dtype=np.float16
        )
        return awq_tensors(made), made.dequantized()

    def config(kept: list[str]) -> dict[str, Any]:
        named = [name for name in kept if name != "lm_head"]  # the tool never quantises it
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": named or None,
        }

    return Format(f"awq-g{group_size}", quantize, config, dtype="float16")


def input_order(layer: str, inputs: int) -> Array:
    """int[E]: the order in which "act order" takes a layer's inputs; the same for layers that share them."""
    shared = not layer.endswith(("o_proj", "down_proj"))
    seed = layer.rpartition(".")[0] if shared else layer
    return np.random.default_rng(zlib.crc32(seed.encode())).permutation(inputs)


def gptq_tensors(made: Integers, bits: int, *, v2: bool, g_idx: bool = True) -> dict[str, Array]:
    """As stored. Zeros of the first version are one less, modulo 2^bits."""
    zeros = made.zeros if v2 else (made.zeros - 1) % 2**bits
    groups = {"g_idx": made.groups} if g_idx else {}  # [E]
    return {
        "qweight": pack(made.q, bits).T,  # [E * bits / 32, F]
        "qzeros": pack(zeros.T, bits),  # [J, F * bits / 32]
        "scales": made.scales.T,  # [J, F]
        **groups,
    }


def _gptq(
    name: str,
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    act_order: bool = False,
    g_idx: bool = True,
    checkpoint_format: str | None = None,
    v2_zeros: bool = False,
    dtype: str = "float16",
    **other: Any,
) -> Format:
    """With `v2_zeros` zeros are those of the second version, whatever the config says."""

    def quantize(layer: str, weight: Array) -> tuple[dict[str, Array], Array]:
        made = integers(
            weight,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            scale_dtype=DTYPES[dtype],
            order=input_order(layer, weight.shape[1]) if act_order else None,
        )
        v2 = v2_zeros or checkpoint_format == "gptq_v2"
        return gptq_tensors(made, bits, v2=v2, g_idx=g_idx), made.dequantized()

    def config(kept: list[str]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": act_order,
            "sym": symmetric,
            "damp_percent": 0.01,
            "true_sequential": True,
            "lm_head": "lm_head" not in kept,
        }
        named = [
            pattern for pattern in kept if pattern != "lm_head" and not pattern.endswith(".gate")
        ]
        if named:  # GPTQModel's way; nothing is said of routers
            result["dynamic"] = {f"-:{_expression(pattern)}": {} for pattern in named}
        if checkpoint_format is not None:  # else it is the first version
            result["checkpoint_format"] = checkpoint_format
        return result

    return Format(f"gptq-{name}", quantize, config, dtype=dtype, **other)


def _expression(pattern: str) -> str:
    """A regular expression for the names of layers in which the dotted parts of `pattern` are."""
    if pattern.startswith("re:"):
        return pattern.removeprefix("re:")
    return rf"(.*\.)?{re.escape(pattern)}(\..*)?$"


FORMATS = (
    _awq(32),
    _awq(64),
    _awq(128),
    _gptq("4-g128"),
    _gptq("4-g32", group_size=32, checkpoint_format="gptq"),
    _gptq("4-channel", group_size=-1),
    _gptq("4-asym", group_size=32, symmetric=False, checkpoint_format="gptq"),
    _gptq("4-asym-v2", group_size=32, symmetric=False, checkpoint_format="gptq_v2"),
    _gptq("4-v2", group_size=32, checkpoint_format="gptq_v2", dtype="bfloat16"),
    _gptq("4-act-order", group_size=32, act_order=True),
    _gptq("4-asym-act-order", group_size=32, symmetric=False, act_order=True),
    _gptq("4-wrong-version", checkpoint_format="gptq", v2_zeros=True),  # as of some GPTQModels
    _gptq("4-no-g-idx", group_size=32, g_idx=False),
    _gptq("4-zero-biases", zero_biases=True),
    _gptq("4-quantize-config", config_file="quantize_config.json"),
    _gptq("8-g128", bits=8),
    _gptq("8-channel", bits=8, group_size=-1),
    _gptq("8-asym-act-order", bits=8, group_size=32, symmetric=False, act_order=True),
)
