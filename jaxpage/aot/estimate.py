"""From the compiler's reports to what a user wants to know: does it fit, how many tokens, how fast at best.

Pure arithmetic on the result of `worker.measure`. Must not know compilers.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.aot.exchange import Collective, seconds_of
from jaxpage.aot.targets import Links
from jaxpage.runner.memory import pool_bytes_of

NOTHING_HELPS = (
    "a larger chip: neither a shorter length, smaller steps, int8 nor 8 times the devices is enough"
)
# What `pallas_kernels.paged_attention.tpu_layout` says of a block size that the kernel cannot read.
_BLOCK_SIZE = re.compile(r"needs a block_size that is a power of two and (at least \d+)")


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The fastest possible decode step, in ms. Weights and KV are read once, and recurrent states read and written;
    meanwhile every token is multiplied by the parameters, of experts only by its own; then devices exchange. A draft
    model runs before.
    """

    weights: float
    kv: float
    products: float
    exchange: float
    state: float = 0.0  # recurrent states
    drafts: float = 0.0  # all passes of the draft model, without exchange

    @property
    def total(self) -> float:
        return max(self.weights + self.kv + self.state, self.products) + self.exchange + self.drafts


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
    """The step of `batch` sequences of `length` tokens, each with all its drafts, as far as the largest step has room
    for them. Before it the draft model decodes them one after the other, and in it computes all tokens but no logits.
    """
    drafts = measured["drafts"]
    if drafts is None:
        return _pass(measured, measured, (batch, batch, length))
    num_tokens = num_checked(measured, batch)
    step = _pass(measured, measured, (batch, num_tokens, length))
    model = drafts["model"]
    if model is None:
        return step
    each = _pass(measured, model, (batch, batch, length))
    in_step = _pass(measured, without_head(model), (batch, num_tokens, length))
    times = drafts["num_tokens"] if num_tokens > batch else 0
    exchange = times * each.exchange + in_step.exchange
    of_drafts = times * each.total + in_step.total - exchange
    return replace(step, drafts=of_drafts, exchange=step.exchange + exchange)


def without_head(model: dict[str, Any]) -> dict[str, Any]:
    """What a pass needs that computes no logits."""
    return model | {
        "bytes_per_step": model["bytes_per_step"] - model["head_bytes"],
        "flops_per_token": model["flops_per_token"] - model["head_flops"],
        "exchange": [each for each in model["exchange"] if each[0] != "all-to-all"],
    }


def num_checked(measured: dict[str, Any], batch: int) -> int:
    """Tokens of a step of `batch` sequences with their drafts, which get what is left of the step's tokens."""
    most = measured["config"]["max_num_batched_tokens"]
    return min(batch * (1 + measured["drafts"]["num_tokens"]), max(batch, most))


def _pass(
    measured: dict[str, Any], model: dict[str, Any], case: tuple[int, int, int]
) -> DecodeStep:
    """A pass through `model`, the plan's or its draft model. case: rows, all their tokens, their length."""
    (batch, num_tokens, length), chip = case, measured["chip"]
    num_devices, links = measured["num_devices"], Links(**measured["links"])
    exchange = sum(
        seconds_of(Collective(*each), num_tokens, num_devices, links) for each in model["exchange"]
    )
    block_size, recurrence = measured["config"]["block_size"], model["recurrence"]
    flops, state_bytes = model["flops_per_token"], 0
    if recurrence is not None:
        flops += recurrence["flops_per_token"]
        state_bytes = 2 * batch * recurrence["sequence_bytes"]
    return DecodeStep(
        weights=1000 * _bytes_per_step(model, num_tokens) / chip["bytes_per_second"],
        kv=1000 * kv_bytes(model, block_size, batch, length) / chip["bytes_per_second"],
        products=1000 * num_tokens * flops / chip["flops_per_second"],
        exchange=1000 * exchange,
        state=1000 * state_bytes / chip["bytes_per_second"],
    )


def kv_bytes(model: dict[str, Any], block_size: int, count: int, kv_len: int) -> int:
    """Bytes of keys and values that `count` rows read: of each KV-cache group the blocks within its window. A group
    with fewer layers than another leaves some of a block unused; layers may read the KV of others.
    """
    in_layers = sum(
        num_layers * -(-(kv_len if window is None else min(kv_len, window)) // block_size)
        for window, num_layers in model["kv_groups"]
    )
    return round(count * in_layers * model["layer_block_bytes"])


def _bytes_per_step(model: dict[str, Any], num_tokens: int) -> float:
    """Weights that a step reads. Of experts those that some of its tokens use, if all are equally likely."""
    experts = model["experts"]
    if experts is None:
        return model["bytes_per_step"]
    unused = (1 - experts["experts_per_token"] / experts["num_experts"]) ** num_tokens
    return model["bytes_per_step"] - unused * experts["weight_bytes"]


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
    smaller = (
        n
        for n, temp_bytes, count in measured["smaller_steps"]
        if (count + 1) * block <= left + measured["temp_bytes"] - temp_bytes
    )
    found += [f"--max-num-batched-tokens {n}" for n in itertools.islice(smaller, 1)]
    in_int8 = measured["in_int8"]
    if in_int8["block_bytes"] is not None and (wanted + 1) * in_int8["block_bytes"] <= left:
        found.append("--kv-cache-dtype int8")
    if in_int8["weight_bytes"] is not None:
        if (wanted + 1) * block <= _pool_bytes(measured, in_int8["weight_bytes"]):
            found.append("--quantization int8")
    if (recurrence := measured["recurrence"]) is not None:
        cached = recurrence["num_cached"] * recurrence["sequence_bytes"]
        if cached and (wanted + 1) * block <= left + cached:
            found.append("--no-enable-prefix-caching")
        most_rows = measured["config"]["max_num_seqs"]
        halves = (most_rows >> times for times in range(1, most_rows.bit_length()))
        freed = ((rows, (most_rows - rows) * recurrence["sequence_bytes"]) for rows in halves)
        fewer = next((rows for rows, more in freed if (wanted + 1) * block <= left + more), None)
        found += [f"--max-num-seqs {fewer}"] if fewer else []
    model = measured["drafts"] and measured["drafts"]["model"]
    if model and (wanted + 1) * (block - model["block_bytes"]) <= _pool_bytes(
        measured, weights - model["weight_bytes"]
    ):
        found.append("no draft model")
    for times in (2, 4, 8):
        if (wanted + 1) * block / times <= _pool_bytes(measured, weights // times):
            num_devices = times * measured["num_devices"]
            is_there = num_devices <= measured["target_devices"]
            where = "" if is_there else " on a target with as many devices"
            found.append(f"--tp {num_devices}{where}")
            break
    return tuple(found) or (NOTHING_HELPS,)
