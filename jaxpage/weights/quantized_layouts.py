"""The tensors of a quantised weight, as AWQ, GPTQ and compressed-tensors store them, and how they are unpacked.

Knows these layouts. Must not know how the tensors of a checkpoint are found.

Letters: F outputs, E inputs, J groups of inputs that share a scale. A word is an int32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxpage.weights.quantized import QuantizedTensor, Unpacked
from jaxpage.weights.safetensors import StoredTensor
from jaxpage.weights.spec import FLOATS

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# The i-th 4 bits of AutoAWQ's words are of the column AWQ_ORDER[i] of eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(QuantizedTensor):
    """AutoAWQ's: 4 bits, 8 outputs of an input in a word, in AWQ_ORDER. Zeros likewise."""

    name: str
    qweight: StoredTensor  # int32[E, F / 8]
    scales: StoredTensor  # float[J, F]
    qzeros: StoredTensor  # int32[J, F / 8]

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1] * 8, self.qweight.shape[0]

    @property
    def number(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def num_groups(self) -> int | None:
        return self.scales.shape[0]

    def check(self) -> None:
        _check_dimensions(self.qweight, self.scales)
        num_out, num_in = self.shape
        num_groups = self.scales.shape[0]
        _check_groups(self.scales, num_groups, num_in)
        _check(self.qweight, np.int32, (num_in, num_out // 8))
        _check(self.scales, None, (num_groups, num_out))
        _check(self.qzeros, np.int32, (num_groups, num_out // 8))

    def unpack(self) -> Unpacked:
        scale = self.scales.read().astype(np.float32)
        return Unpacked(
            q=_awq_rows(self.qweight.read()),
            scale=scale,
            zero=_awq_rows(self.qzeros.read()).T.astype(np.int16),
            group_size=self.shape[1] // len(scale),
        )


@dataclass(frozen=True)
class Gptq(QuantizedTensor):
    """AutoGPTQ's: 4 or 8 bits, inputs of an output in a word. Of zeros, a word has adjacent outputs."""

    name: str
    bits: int
    zeros_less_one: bool  # so that a zero of 0 is stored as the largest number
    has_zeros: bool  # otherwise the zero is the middle; what tools write to `qzeros` differs
    has_order: bool  # whether inputs of a group may be apart
    qweight: StoredTensor  # int32[E bits / 32, F]
    scales: StoredTensor  # float[J, F]
    qzeros: StoredTensor  # int32[J, F bits / 32]
    g_idx: StoredTensor | None  # int32[E]: the group of each input; None: adjacent inputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], self.qweight.shape[0] * 32 // self.bits

    @property
    def number(self) -> np.dtype:
        return _number(self.bits)

    @property
    def num_groups(self) -> int | None:
        return self.scales.shape[0]

    def check(self) -> None:
        _check_dimensions(self.qweight, self.scales)
        num_out, num_in = self.shape
        num_groups = self.scales.shape[0]
        if not self.has_order:
            _check_groups(self.scales, num_groups, num_in)
        _check(self.qweight, np.int32, (num_in * self.bits // 32, num_out))
        _check(self.scales, None, (num_groups, num_out))
        _check(self.qzeros, np.int32, (num_groups, num_out * self.bits // 32))
        if self.g_idx is not None:
            _check(self.g_idx, np.int32, (num_in,))
        elif self.has_order:
            raise ValueError(f"{self.name} is quantised with desc_act, but it has no g_idx")

    def unpack(self) -> Unpacked:
        q = _columns(np.ascontiguousarray(self.qweight.read().T), self.bits)
        scale = self.scales.read().astype(np.float32)
        zero = _columns(self.qzeros.read(), self.bits).astype(np.int16)
        if not self.has_zeros:
            self._check_symmetric(zero)
            zero = np.full(scale.shape, 2 ** (self.bits - 1), np.int16)
        elif self.zeros_less_one:
            zero = (zero + 1) % 2**self.bits
        q, zero = _signed(q, zero, self.bits)
        size = q.shape[1] // len(scale)
        return Unpacked(q, scale, zero, _groups(self.g_idx, len(scale), size), size)

    def _check_symmetric(self, stored: np.ndarray) -> None:
        """`stored`: int16[J, F]. Tools write the middle, one less, or nothing."""
        middle, least, most = 2 ** (self.bits - 1), stored.min(), stored.max()
        if least != most or least not in (0, middle - 1, middle):
            raise ValueError(
                f"{self.qzeros.name} has zeros from {least} to {most}, and those of symmetric weights would be "
                f"{middle - 1} or {middle} everywhere: config.json says sym: true, where sym: false seems right; "
                'correct it, or pass hf_overrides with a whole "quantization_config"'
            )


@dataclass(frozen=True)
class Packed(QuantizedTensor):
    """compressed-tensors' pack-quantized: 4 or 8 bits, adjacent inputs of an output in a word, as q + 2^(bits - 1). Of
    zeros, a word has adjacent outputs.
    """

    name: str
    bits: int
    weight_packed: StoredTensor  # int32[F, E bits / 32]
    weight_scale: StoredTensor  # float[F, J]
    weight_zero_point: StoredTensor | None  # int32[F bits / 32, J]; None: 0
    weight_g_idx: StoredTensor | None  # int32[E]: the group of each input; None: adjacent inputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_packed.shape[0], self.weight_packed.shape[1] * 32 // self.bits

    @property
    def number(self) -> np.dtype:
        return _number(self.bits)

    @property
    def num_groups(self) -> int | None:
        return self.weight_scale.shape[-1]

    def check(self) -> None:
        _check_dimensions(self.weight_packed, self.weight_scale)
        num_out, num_in = self.shape
        num_groups = self.weight_scale.shape[1]
        if self.weight_g_idx is None:
            _check_groups(self.weight_scale, num_groups, num_in)
        _check(self.weight_packed, np.int32, (num_out, num_in * self.bits // 32))
        _check(self.weight_scale, None, (num_out, num_groups))
        if self.weight_zero_point is not None:
            _check(self.weight_zero_point, np.int32, (num_out * self.bits // 32, num_groups))
        if self.weight_g_idx is not None:
            _check(self.weight_g_idx, np.int32, (num_in,))

    def unpack(self) -> Unpacked:
        q, middle = _columns(self.weight_packed.read(), self.bits), 2 ** (self.bits - 1)
        scale = np.ascontiguousarray(self.weight_scale.read().astype(np.float32).T)
        zero = np.full(scale.shape, middle, np.int16)
        if self.weight_zero_point is not None:
            words = np.ascontiguousarray(self.weight_zero_point.read().T)
            zero = _columns(words, self.bits).astype(np.int16)
        q, zero = _signed(q, zero, self.bits)
        size = q.shape[1] // len(scale)
        return Unpacked(q, scale, zero, _groups(self.weight_g_idx, len(scale), size), size)


@dataclass(frozen=True)
class Plain(QuantizedTensor):
    """int8 or fp8 as an array of its own, with a scale for all of it, for each output, for each group or block."""

    name: str
    group_size: int | None  # inputs of a group or a block
    block_outputs: int  # outputs of a block; 1 of groups
    weight: StoredTensor  # int8 or fp8 [F, E]
    scale: StoredTensor  # float [], [1], [F], [F, 1], or [F / block_outputs, J]
    zero: StoredTensor | None  # int8, as `scale`; None: 0
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.weight.shape
        return num_out, num_in

    @property
    def number(self) -> np.dtype:
        return self.weight.dtype

    @property
    def num_groups(self) -> int | None:
        return None if self.group_size is None else -(-self.shape[1] // self.group_size)

    def check(self) -> None:
        _check_dimensions(self.weight)
        num_out, num_in = self.shape
        if self.weight.dtype not in (np.int8, FP8):
            raise ValueError(
                f"{self.weight.name} is {self.weight.dtype}; supported are int8 and e4m3"
            )
        if self.group_size is None:
            if math.prod(self.scale.shape) not in (1, num_out):
                _check(self.scale, None, (num_out, 1))
        else:
            shape = (-(-num_out // self.block_outputs), -(-num_in // self.group_size))
            _check(self.scale, None, shape)
        if self.zero is not None:
            _check(self.zero, np.int8, self.scale.shape)

    def unpack(self) -> Unpacked:
        num_out, num_in = self.shape
        scale = self.scale.read().astype(np.float32)
        zero = None if self.zero is None else self.zero.read().astype(np.int16)
        if zero is not None and not zero.any():
            zero = None
        if self.group_size is not None:
            return Unpacked(
                self.weight.read(),
                self._of_outputs(scale),
                None if zero is None else self._of_outputs(zero),
                group_size=self.group_size,
            )
        scale = np.broadcast_to(scale.reshape(-1), num_out)
        if zero is None:
            return Unpacked(self.weight.read(), scale)
        zero = np.broadcast_to(zero.reshape(1, -1), (1, num_out))
        return Unpacked(self.weight.read(), scale[None], zero, group_size=num_in)

    def _of_outputs(self, array: np.ndarray) -> np.ndarray:
        """[blocks of F, J] as [J, F]."""
        return np.repeat(array.T, self.block_outputs, axis=1)[:, : self.shape[0]]


def _number(bits: int) -> np.dtype:
    return np.dtype(np.uint8 if bits == 4 else np.int8)


def _columns(words: np.ndarray, bits: int) -> np.ndarray:
    """int32[..., N] -> uint8[..., N * 32 / bits]; a word begins with its lowest bits."""
    octets = words.astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*words.shape[:-1], -1)


def _awq_rows(words: np.ndarray) -> np.ndarray:
    """int32[E, N] -> uint8[8 N, E]"""
    num_in, num_words = words.shape
    # Words are transposed, not their eight times as many numbers.
    octets = np.ascontiguousarray(words.T).astype("<i4", copy=False).view(np.uint8)
    rows = np.empty((num_words, 8, num_in), np.uint8)
    for i in range(4):
        octet = octets[:, i::4]
        np.bitwise_and(octet, 15, out=rows[:, AWQ_ORDER[2 * i]])
        np.right_shift(octet, 4, out=rows[:, AWQ_ORDER[2 * i + 1]])
    return rows.reshape(-1, num_in)


def _groups(stored: StoredTensor | None, num_groups: int, size: int) -> np.ndarray | None:
    """int32[E], the group of each input; None: each group has `size` adjacent inputs."""
    groups = None if stored is None else stored.read()
    if stored is None or groups is None or np.array_equal(groups, np.arange(len(groups)) // size):
        return None
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ValueError(
            f"{stored.name} has groups {groups.min()} to {groups.max()}, but there are {num_groups}: the checkpoint "
            "is damaged"
        )
    return groups


def _signed(q: np.ndarray, zero: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """8 bits as int8, which the middle of the unsigned integers makes 0."""
    if bits == 4:
        return q, zero
    return (q ^ 128).view(np.int8), zero - 128


def _check_dimensions(*tensors: StoredTensor) -> None:
    for tensor in tensors:
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ValueError(
                f"{tensor.name} has shape {list(tensor.shape)}; a matrix is expected: the checkpoint is damaged"
            )


def _check_groups(scales: StoredTensor, num_groups: int, num_in: int) -> None:
    if num_in % num_groups:
        raise ValueError(
            f"{scales.name} has shape {list(scales.shape)}: {num_in} inputs are not divided into {num_groups} groups"
        )


def _check(tensor: StoredTensor, dtype: DTypeLike | None, shape: tuple[int, ...]) -> None:
    """`dtype` None: floats."""
    fits = tensor.dtype in FLOATS if dtype is None else tensor.dtype == dtype
    if tensor.shape != shape or not fits:
        wanted = "floats" if dtype is None else np.dtype(dtype).name
        raise ValueError(
            f"{tensor.name} is {tensor.dtype}{list(tensor.shape)} in the checkpoint; with the other tensors of this "
            f"layer it should be {wanted}{list(shape)}: it is damaged, or config.json does not belong to it"
        )
