"""From the compiler's reports to what a user wants to know: does it fit, how many tokens, how fast at best.

Pure arithmetic on the result of `worker.measure`. Must not know compilers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxpage.aot.exchange import Collective, seconds_of
from jaxpage.aot.targets import Links
from jaxpage.runner.memory import pool_bytes_of

NOTHING_HELPS = "a larger chip: neither a shorter length, int8 nor 8 times the devices is enough"
# What `pallas_kernels.paged_attention.tpu_layout` says of a block size that the kernel cannot read.
_BLOCK_SIZE = re.compile(r"needs a block_size that is a power of two and (at least \d+)")


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The fastest possible decode step, in ms. Weights and KV are read once, and meanwhile every token is multiplied by
    the parameters, of experts only by its own; then devices exchange.
    """

    weights: float
    kv: float
    products: float
    exchange: float

    @property
    def total(self) -> float:
        return max(self.weights + self.kv, self.products) + self.exchange


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and times of one device; all devices of the plan hold and do the same."""

    weight_bytes: int
    state_bytes: int
    temp_bytes: int  # of the largest step, including its results
    pool_bytes: int  # left for KV
    block_bytes: int
    num_blocks: int  # without the null block
    num_tokens: int  # of the longest sequence that fits on its own, see `kv_groups`
    fits: bool  # whether one sequence of max_model_len fits
    batches: dict[int, int]  # from sequence length to how many fit at once
    decode: dict[tuple[int, int], DecodeStep]  # by (batch, length)
    changes: tuple[str, ...]  # each would make it fit


def estimate(measured: dict[str, Any]) -> Estimate:
    """The estimate for one target."""
    config = measured["config"]
    left = _pool_bytes(measured, measured["weight_bytes"])
    num_blocks = max(0, measured["num_blocks"] - 1) if left > 0 else 0
    blocks = {int(n): counts for n, counts in measured["blocks"].items()}
    wanted, most_rows = config["max_model_len"], config["max_num_seqs"]
    largest, _ = blocks[wanted]
    fits = num_blocks >= largest
    lengths = [(wanted, largest), *measured["longest"]]
    batches = {n: min(_at_once(num_blocks, *counts), most_rows) for n, counts in blocks.items()}
    cases = [(1, min(blocks)), *((count, n) for n, count in batches.items() if count > 1)]
    return Estimate(
        weight_bytes=measured["weight_bytes"],
        state_bytes=measured["state_bytes"],
        temp_bytes=measured["temp_bytes"],
        pool_bytes=max(0, left),
        block_bytes=measured["block_bytes"],
        num_blocks=num_blocks,
        num_tokens=next((n for n, count in lengths if count <= num_blocks), 0),
        fits=fits,
        batches=batches,
        decode={(batch, n): decode_step(measured, batch, n) for batch, n in cases},
        changes=() if fits else _changes(measured, largest),
    )


def _at_once(num_blocks: int, most: int, decoding: int) -> int:
    """Sequences that fit while all decode but one, which may hold the most: its prompt is being computed."""
    return 0 if num_blocks < most else (num_blocks - most) // decoding + 1


def decode_step(measured: dict[str, Any], batch: int, length: int) -> DecodeStep:
    """The step of `batch` sequences of `length` tokens."""
    chip, num_devices, links = measured["chip"], measured["num_devices"], Links(**measured["links"])
    exchange = sum(
        seconds_of(Collective(*each), batch, num_devices, links) for each in measured["exchange"]
    )
    return DecodeStep(
        weights=1000 * _bytes_per_step(measured, batch) / chip["bytes_per_second"],
        kv=1000 * kv_bytes(measured, batch, length) / chip["bytes_per_second"],
        products=1000 * batch * measured["flops_per_token"] / chip["flops_per_second"],
        exchange=1000 * exchange,
    )


def kv_bytes(measured: dict[str, Any], count: int, kv_len: int) -> int:
    """Bytes of keys and values that `count` rows read: of each KV-cache group the blocks within its window. A group
    with fewer layers than another leaves some of a block unused; layers may read the KV of others.
    """
    block_size, groups = measured["config"]["block_size"], measured["kv_groups"]
    in_layers = sum(
        num_layers * -(-(kv_len if window is None else min(kv_len, window)) // block_size)
        for window, num_layers in groups
    )
    return round(count * in_layers * measured["block_bytes"] / measured["num_arrays"])


def _bytes_per_step(measured: dict[str, Any], batch: int) -> float:
    """Weights that a step reads. Of experts those that some token of the batch uses, if all are equally likely."""
    experts = measured["experts"]
    if experts is None:
        return measured["bytes_per_step"]
    unused = (1 - experts["experts_per_token"] / experts["num_experts"]) ** batch
    return measured["bytes_per_step"] - unused * experts["weight_bytes"]


def _pool_bytes(measured: dict[str, Any], weight_bytes: int) -> int:
    return pool_bytes_of(
        measured["chip"]["num_bytes"],
        weight_bytes + measured["state_bytes"] + measured["temp_bytes"],
        utilization=measured["config"]["gpu_memory_utilization"],
    )


def _changes(measured: dict[str, Any], wanted: int) -> tuple[str, ...]:
    """What would make one sequence of max_model_len fit, from sizes alone: nothing is compiled for it."""
    block, weights = measured["block_bytes"], measured["weight_bytes"]
    needed = _BLOCK_SIZE.search(measured["attention"])
    # A step in plain XLA that copies the pool needs more than there is, whatever is left for the pool.
    if needed and measured["temp_bytes"] >= measured["chip"]["num_bytes"]:
        return (
            f"the attention kernel instead of plain XLA: set --block-size to a power of two, {needed[1]}",
        )
    found = []
    left = _pool_bytes(measured, weights)
    shorter = next((n for n, count in measured["longest"] if (count + 1) * block <= left), None)
    if shorter:
        found.append(f"--max-model-len {shorter}")
    in_int8 = measured["in_int8"]
    if in_int8["block_bytes"] is not None and (wanted + 1) * in_int8["block_bytes"] <= left:
        found.append("--kv-cache-dtype int8")
    if in_int8["weight_bytes"] is not None:
        if (wanted + 1) * block <= _pool_bytes(measured, in_int8["weight_bytes"]):
            found.append("--quantization int8")
    for times in (2, 4, 8):
        if (wanted + 1) * block / times <= _pool_bytes(measured, weights // times):
            num_devices = times * measured["num_devices"]
            is_there = num_devices <= measured["target_devices"]
            where = "" if is_there else " on a target with as many devices"
            found.append(f"--tp {num_devices}{where}")
            break
    return tuple(found) or (NOTHING_HELPS,)
