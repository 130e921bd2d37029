"""Which tensors of a checkpoint are a quantised weight.

Knows the names that AWQ, GPTQ, fp8 and compressed-tensors give them. Must not know models or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from jaxpage.weights.quantization import Quantization, WeightFormat
from jaxpage.weights.quantized import QuantizedTensor
from jaxpage.weights.quantized_layouts import FP8, Awq, Gptq, Packed, Plain
from jaxpage.weights.safetensors import StoredTensor

# Scales of activations and of the KV cache: activations stay floats, or are rounded by scales of their own.
_UNUSED = tuple(
    f".{name}"
    for name in (
        *("input_scale", "activation_scale", "input_zero_point"),
        *("output_scale", "output_zero_point"),
        *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale"),
        *("k_zero_point", "v_zero_point", "q_zero_point"),
    )
)


def with_quantized(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> dict[str, StoredTensor | QuantizedTensor]:
    """`stored` with one object in place of the tensors of each quantised weight, and without scales that are not used.

    Raises ValueError for tensors whose shapes or dtypes do not fit each other, or the quantization.
    """
    if quantization is None:
        _check_not_quantised(stored)
        return dict(stored)
    left = {name: each for name, each in stored.items() if not name.endswith(_UNUSED)}
    found: dict[str, StoredTensor | QuantizedTensor] = {}
    for name in stored:
        layer, _, suffix = name.rpartition(".")
        make = _MAKERS.get(suffix)
        if make is None or name not in left:
            continue
        if suffix == "weight_scale" and f"{layer}.weight_packed" in left:
            continue  # it is found with the packed weights
        if not quantization.formats:
            raise ValueError(f"{layer} is quantised, but quantization_config says of no layer how")
        # Rules for exceptions are read in different ways by different tools; the tensors are what counts.
        form = quantization.format_of(layer) or quantization.formats[-1][1]
        tensors = _Tensors(layer, left)
        try:
            found[f"{layer}.weight"] = tensor = make(tensors, form, quantization)
        except KeyError as error:
            raise ValueError(
                f"{layer} is quantised, but the checkpoint lacks {error.args[0]}"
            ) from None
        tensor.check()
        _check_form(tensor, form)
    _check_scales(left)
    return left | found


def _check_form(tensor: QuantizedTensor, form: WeightFormat) -> None:
    """Raise ValueError unless numbers and groups are those of config.json. Only blocks may exceed what is left."""
    if isinstance(tensor, Plain) and (tensor.weight.dtype == FP8) != (form.format == "fp8_e4m3"):
        raise ValueError(
            f"{tensor.name} is stored as {tensor.weight.dtype}, and config.json says {form.format}: check that "
            "config.json belongs to the weights"
        )
    size, num_in, found = form.group_size, tensor.shape[1], tensor.num_groups
    if size is None or found is None:
        return
    may_be_partial = isinstance(tensor, Plain) or form.has_order
    if found != -(-num_in // size) or (num_in % size and not may_be_partial):
        raise ValueError(
            f"{tensor.name} has scales for {found} groups of its {num_in} inputs, and config.json says groups of "
            f"{size}: check that config.json belongs to the weights"
        )


def _check_scales(left: Mapping[str, StoredTensor]) -> None:
    """`left`: what belongs to no quantised weight."""
    for name, tensor in left.items():
        if name.endswith(".weight") and tensor.dtype in (np.int8, FP8):
            raise ValueError(
                f"{name} is stored as {tensor.dtype}, but the checkpoint lacks its scale, {name}_scale or "
                f"{name}_scale_inv: it is damaged or incomplete, download it again"
            )


def _check_not_quantised(stored: Mapping[str, StoredTensor]) -> None:
    for name in stored:
        if name.rpartition(".")[2] in _MAKERS:
            raise ValueError(
                f"the checkpoint is quantised, as it has {name}, but its config.json has no quantization_config, which "
                'says how. If you know, pass hf_overrides={"quantization_config": ...}, which may be the content of a '
                "quantize_config.json beside it with its quant_method"
            )


class _Tensors:
    """The tensors of a layer, taken out of those of the checkpoint."""

    def __init__(self, layer: str, stored: dict[str, StoredTensor]):
        self.layer, self._stored = layer, stored

    def take(self, suffix: str) -> StoredTensor:
        return self._stored.pop(f"{self.layer}.{suffix}")

    def take_if_there(self, suffix: str) -> StoredTensor | None:
        return self._stored.pop(f"{self.layer}.{suffix}", None)


def _with_qweight(tensors: _Tensors, form: WeightFormat, quantization: Quantization):
    name = f"{tensors.layer}.weight"
    qweight, scales, qzeros = (tensors.take(each) for each in ("qweight", "scales", "qzeros"))
    if quantization.method == "awq":
        return Awq(name, qweight, scales, qzeros)
    return Gptq(
        name,
        bits=_bits(form),
        zeros_less_one=quantization.stores_zeros_less_one,
        has_zeros=form.has_zeros,
        has_order=form.has_order,
        qweight=qweight,
        scales=scales,
        qzeros=qzeros,
        g_idx=tensors.take_if_there("g_idx"),
    )


def _packed(tensors: _Tensors, form: WeightFormat, quantization: Quantization) -> Packed:
    del quantization
    tensors.take_if_there("weight_shape")
    return Packed(
        f"{tensors.layer}.weight",
        bits=_bits(form),
        weight_packed=tensors.take("weight_packed"),
        weight_scale=tensors.take("weight_scale"),
        weight_zero_point=tensors.take_if_there("weight_zero_point"),
        weight_g_idx=tensors.take_if_there("weight_g_idx"),
    )


def _plain(suffix: str, tensors: _Tensors, form: WeightFormat, quantization: Quantization) -> Plain:
    del quantization
    return Plain(
        f"{tensors.layer}.weight",
        group_size=form.group_size,
        block_outputs=form.block_outputs,
        weight=tensors.take("weight"),
        scale=tensors.take(suffix),
        zero=tensors.take_if_there("weight_zero_point"),
        rounds_inputs=form.rounds_inputs,
    )


# A tensor that only quantised weights have -> the function that makes one of it and its siblings.
_MAKERS: dict[str, Callable[[_Tensors, WeightFormat, Quantization], QuantizedTensor]] = {
    "qweight": _with_qweight,
    "weight_packed": _packed,
    "weight_scale": partial(_plain, "weight_scale"),
    "weight_scale_inv": partial(_plain, "weight_scale_inv"),
}


def _bits(form: WeightFormat) -> int:
    return 4 if form.format == "int4" else 8
