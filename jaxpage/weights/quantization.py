"""How the weights of a checkpoint are quantised, from the quantization_config of its config.json.

Knows the methods' names and options. Must not know tensors, models or jax.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
MXFP4 = "mxfp4"  # experts of gpt-oss
_IN_WEIGHTS = {"weight_input", "weight_output"}  # where its transforms are part of stored weights
_UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")  # of compressed-tensors
_ADVICE = (
    "use the checkpoint in bfloat16, float16 or float32 that it was made from. jaxpage can round that itself: "
    'quantization="int8" for linear layers, kv_cache_dtype for the KV cache'
)

Format = Literal["int4", "int8", "fp8_e4m3"]


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How a linear layer is stored."""

    format: Format
    # Inputs that share a scale; None: all inputs of an output, or of all outputs.
    group_size: int | None
    block_outputs: int = 1  # outputs that share scales
    # A weight is (q - zero) * scale; without zeros the zero is the middle of the unsigned integers.
    has_zeros: bool = False
    has_order: bool = False  # the inputs of a group are not adjacent, as with GPTQ's desc_act
    # It was made for inputs that are rounded to int8 too, and has a scale for each output or for all.
    rounds_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A checkpoint's quantization.

    `formats`: patterns of layers, and their format; the first that matches holds. `ignored`: layers that are not
    quantised. A pattern is a regular expression after "re:", "Linear" for every layer, or a part of a name between
    dots.
    """

    method: str
    formats: tuple[tuple[str, WeightFormat], ...]
    ignored: tuple[str, ...] = ()
    stores_zeros_less_one: bool = False  # GPTQ's first format

    def format_of(self, layer: str) -> WeightFormat | None:
        """The format of a linear layer by its name in the checkpoint; None: not quantised."""
        if self.ignores(layer):
            return None
        names = _names_of(layer)
        return next((form for pattern, form in self.formats if _match((pattern,), names)), None)

    def ignores(self, layer: str) -> bool:
        """Whether an exception has this name."""
        return _match(self.ignored, _names_of(layer))


def quantization_of(config: Any) -> Quantization | None:
    """The quantization that a quantization_config declares; None: none, or gpt-oss's mxfp4.

    Raises ValueError for what is not supported.
    """
    if not config:
        return None
    if not isinstance(config, dict):
        raise ValueError(f"quantization_config must be an object, got {config!r}")
    method = config.get("quant_method")
    if method == MXFP4:
        return None
    readers = dict(zip(METHODS, (_awq, _gptq, _fp8, _compressed_tensors), strict=True))
    if method not in METHODS:
        raise unsupported(config, f"the methods are {', '.join(METHODS)}")
    try:
        found = readers[method](config)
        _prepared((*found.ignored, *(pattern for pattern, _ in found.formats)))
    except (KeyError, TypeError, AttributeError, re.error) as error:
        raise unsupported(config, f"its quantization_config cannot be read: {error!r}") from None
    return found


def with_floats(quantization: Quantization, layers: Iterable[str]) -> Quantization:
    """The same without `layers`, whose weights are floats."""
    return replace(quantization, ignored=(*quantization.ignored, *layers))


def in_words(config: dict[str, Any]) -> str:
    """Method and numbers, for error messages."""
    numbers = (("bits", "{} bits"), ("w_bit", "{} bits"), ("group_size", "groups of {}"))
    facts = [text.format(config[name]) for name, text in numbers if name in config]
    return ", ".join([str(config.get("quant_method", "no quant_method")), *facts])


def _awq(config: dict[str, Any]) -> Quantization:
    """AWQ (arXiv:2306.00978) as AutoAWQ stores it."""
    bits, version = config.get("bits", config.get("w_bit")), config.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm" or not config.get("zero_point", True):
        raise unsupported(
            config, f"version={version!r}; supported are 4 bits with zeros in version gemm"
        )
    form = WeightFormat(
        format="int4",
        group_size=_group_size(config, config.get("group_size", config.get("q_group_size"))),
        has_zeros=True,
    )
    ignored = _flat(config.get("modules_to_not_convert") or ())
    return Quantization(method="awq", formats=(("Linear", form),), ignored=tuple(ignored))


def _gptq(config: dict[str, Any]) -> Quantization:
    """GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel store it."""
    bits, layout = config["bits"], config.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        raise unsupported(
            config, f"checkpoint_format={layout!r}; supported are 4 and 8 bits as gptq or gptq_v2"
        )
    if config.get("is_marlin_format"):
        raise unsupported(
            config, "its weights are stored as a kernel of vLLM wants them (is_marlin_format)"
        )
    # GPTQModel's patterns: "-:" of layers that are not quantised, "+:" of those with other options.
    dynamic = config.get("dynamic") or {}
    if any(not pattern.startswith("-:") for pattern in dynamic):
        raise unsupported(config, "layers have different options (dynamic)")
    form = WeightFormat(
        format="int4" if bits == 4 else "int8",
        group_size=_group_size(config, config["group_size"]),
        has_zeros=not config.get("sym", True),
        has_order=bool(config.get("desc_act", False)),
    )
    quantised = _flat(config.get("modules_in_block_to_quantize") or ["Linear"])
    return Quantization(
        method="gptq",
        formats=tuple((name, form) for name in quantised),
        ignored=tuple("re:" + pattern.removeprefix("-:") for pattern in dynamic),
        stores_zeros_less_one=layout == "gptq",
    )


def _fp8(config: dict[str, Any]) -> Quantization:
    """A scale for each tensor, or for each block as in DeepSeek-V3 (arXiv:2412.19437) and Qwen3's."""
    kind = config.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(config, f"fmt={kind!r}; supported is e4m3")
    blocks = config.get("weight_block_size")
    outputs, inputs = (1, None) if blocks is None else _block(config, blocks)
    form = WeightFormat(format="fp8_e4m3", group_size=inputs, block_outputs=outputs)
    ignored = _flat(config.get("ignored_layers") or config.get("modules_to_not_convert") or ())
    return Quantization(method="fp8", formats=(("Linear", form),), ignored=tuple(ignored))


def _compressed_tensors(config: dict[str, Any]) -> Quantization:
    transforms = (config.get("transform_config") or {}).get("config_groups") or {}
    places = {each["location"] for scheme in transforms.values() for each in scheme["apply"]}
    if online := sorted(places - _IN_WEIGHTS):
        raise unsupported(config, f"activations are transformed, at {online[0]} (transform_config)")
    formats = [
        (target, _compressed_format(config, group))
        for group in config["config_groups"].values()
        for target in _flat(group["targets"])
    ]
    # A rule for every layer is the last one that is asked.
    formats.sort(key=lambda each: each[0] == "Linear")
    return Quantization(
        method="compressed-tensors",
        formats=tuple(formats),
        ignored=tuple(_flat(config.get("ignore") or ())),
    )


def _compressed_format(config: dict[str, Any], group: dict[str, Any]) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    layout, strategy = group.get("format") or config.get("format"), weights["strategy"]
    bits, kind = weights["num_bits"], weights.get("type", "int")
    symmetric = weights.get("symmetric", True)
    packed = layout == "pack-quantized" and kind == "int" and bits in (4, 8)
    plain = layout in _UNPACKED and bits == 8 and kind in ("int", "float")
    if not (packed or plain) or strategy not in ("tensor", "channel", "group", "block"):
        raise unsupported(
            config,
            f"{layout} with {bits} bits of {kind} by {strategy}; supported are 4 and 8 bits of int packed, and 8 bits "
            f"of int or float as {', '.join(_UNPACKED)}",
        )
    size, outputs = None, 1
    if strategy == "group":
        size = _group_size(config, weights["group_size"])
    elif strategy == "block":
        outputs, size = _block(config, weights["block_structure"])
    integers: Format = "int4" if bits == 4 else "int8"
    return WeightFormat(
        format="fp8_e4m3" if kind == "float" else integers,
        group_size=size,
        block_outputs=outputs,
        has_zeros=not symmetric,
        has_order=weights.get("actorder") in ("group", "dynamic", True),
        rounds_inputs=plain and kind == "int" and inputs is not None and size is None,
    )


def _group_size(config: dict[str, Any], size: Any) -> int | None:
    if size == -1:
        return None
    if not isinstance(size, int) or size < 1:
        raise unsupported(config, f"group_size={size!r} is no number of inputs")
    return size


def _block(config: dict[str, Any], sizes: Any) -> tuple[int, int]:
    if not (
        isinstance(sizes, (list, tuple))
        and len(sizes) == 2
        and all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        raise unsupported(config, f"blocks of {sizes!r}, which are not two numbers")
    return sizes[0], sizes[1]


def unsupported(config: dict[str, Any], why: str) -> ValueError:
    """The error for a quantization_config that is not supported."""
    return ValueError(
        f"the checkpoint is quantised ({in_words(config)}), which is not supported: {why}; {_ADVICE}"
    )


def _flat(names: Any) -> list[str]:
    """The names in a list, or in a list of lists."""
    if isinstance(names, str):
        return [names]
    return [name for each in names for name in _flat(each)]


def _names_of(layer: str) -> str:
    """The names of a layer that patterns may mean, each between dots and on a line.

    `layer`: as in a checkpoint of text. In one with pictures too, it may have one of two other prefixes.
    """
    inner = layer.removeprefix("model.")
    return f".{layer}.\n.language_model.{layer}.\n.model.language_model.{inner}."


def _match(patterns: tuple[str, ...], names: str) -> bool:
    """Whether one of the patterns matches one of `_names_of`."""
    # A checkpoint may have 36,000 layers and 300 patterns, so one search has all names.
    parts, expressions = _prepared(patterns)
    if any(part in names for part in parts):
        return True
    each = [name.strip(".") for name in names.splitlines()] if expressions else []
    return any(expression.match(name) for expression in expressions for name in each)


@functools.lru_cache
def _prepared(patterns: tuple[str, ...]) -> tuple[list[str], list[re.Pattern[str]]]:
    """Parts of `_names_of`, and expressions for each of these names."""
    parts = ["" if each == "Linear" else f".{each}." for each in patterns if each[:3] != "re:"]
    return parts, [re.compile(each[3:]) for each in patterns if each[:3] == "re:"]
