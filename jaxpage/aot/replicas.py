"""How to divide a target into replicas: how many devices share the weights.

For `jaxpage plan --tp auto`. Pure arithmetic on estimates. Must not know compilers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpage.aot.estimate import NOTHING_HELPS, DecodeStep, Estimate, decode_step, estimate
from jaxpage.aot.targets import GIB

BATCH = 64  # of each replica, for comparison
# A division with this share of the highest tokens/s is preferred if its step is shorter.
ENOUGH = 0.9
RULE = (
    f"the shortest decode step of one sequence, among those with {ENOUGH:.0%} of the most tokens/s "
    "that all replicas together decode with as many sequences as fit"
)


@dataclass(frozen=True)
class Division:
    """A target whose devices form replicas of `num_devices` each."""

    measured: dict[str, Any]  # of one replica

    @property
    def num_devices(self) -> int:
        return self.measured["num_devices"]

    @property
    def num_replicas(self) -> int:
        return self.measured["target_devices"] // self.num_devices

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.measured)

    @property
    def length(self) -> int:
        """Tokens of the sequences that are compared: 1,024, or max_model_len if that is shorter."""
        return min(self.estimate.batches)

    @property
    def full_batch(self) -> int:
        """The number of sequences that a replica decodes at once."""
        return self.estimate.batches[self.length]

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that a replica's KV blocks hold: each has a slot in every KV-cache group."""
        num_slots = self.estimate.num_blocks * self.measured["config"]["block_size"]
        return num_slots // len(self.measured["kv_groups"])

    def step(self, batch: int) -> DecodeStep:
        return decode_step(self.measured, batch, self.length)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all replicas, with full batches."""
        if self.full_batch == 0:
            return 0.0
        return self.num_replicas * self.full_batch / self.step(self.full_batch).total * 1000

    @property
    def tokens_per_second_per_chip(self) -> float:
        return self.tokens_per_second / self.measured["num_chips"]


def sizes_of(target_devices: int) -> list[int]:
    """Numbers of devices that divide a target evenly."""
    return [n for n in range(1, target_devices + 1) if target_devices % n == 0]


def best(divisions: Iterable[Division]) -> Division | None:
    """The best division by RULE. None if none holds a sequence of `max_model_len`."""
    fitting = [each for each in divisions if each.estimate.fits]
    if not fitting:
        return None
    enough = ENOUGH * max(each.tokens_per_second for each in fitting)
    return min(
        (each for each in fitting if each.tokens_per_second >= enough),
        key=lambda each: each.step(1).total,
    )


def show_divisions(divisions: list[Division]) -> str:
    """A table with a line for each division, and the best one."""
    first = divisions[0]
    length, drafts = first.length, first.measured["drafts"]
    parts, told = "", ""
    kv = "KV and state" if first.measured["recurrence"] else "KV"
    if drafts is not None:
        parts = " + draft model" if drafts["model"] else ""
        told = f", each with {drafts['num_tokens']} drafts; tokens/s if none of them is right"
    wide = _width(first)
    lines = [
        f"{first.measured['target']}, {first.measured['num_chips']} chips; decode steps at best, in ms (weights + "
        f"{kv} + exchange{parts}), with sequences of {length} tokens{told}",
        "",
        f"{'tp':>3}{'replicas':>10}{'fits':>6}{'weights':>9}{'KV tokens':>11}{'batch 1':>{wide}}"
        f"{f'batch {BATCH}':>{wide}}{'full batch':>19}{'tokens/s per chip':>19}",
    ]
    lines += [_line(each) for each in divisions]
    chosen = best(divisions)
    wanted = first.measured["config"]["max_model_len"]
    if chosen is None:
        largest = max(divisions, key=lambda each: each.num_devices)
        conclusion = f"None fits: no sequence of max_model_len={wanted}.{_advice(largest)}"
    else:
        conclusion = f"Best: --tp {chosen.num_devices}, {chosen.num_replicas} replica(s): {RULE}."
    return "\n".join([*lines, "", conclusion])


def _advice(largest: Division) -> str:
    """A sentence, or nothing: what lets this division fit, besides more devices."""
    changes = [each for each in largest.estimate.changes if not each.startswith("--tp ")]
    if changes == [NOTHING_HELPS]:
        return f" It takes {NOTHING_HELPS}."
    if not changes:
        return ""
    return f" The closest is --tp {largest.num_devices}; it would fit with {' or '.join(changes)}."


def _line(division: Division) -> str:
    found, wide = division.estimate, _width(division)
    cells = (
        f"{division.num_devices:>3}{division.num_replicas:>10}{'yes' if found.fits else 'no':>6}"
    )
    cells += f"{found.weight_bytes / GIB:>9.2f}"
    if not found.fits:
        return f"{cells}{division.num_kv_tokens:>11,}"
    full = f"{division.step(division.full_batch).total:.2f} at {division.full_batch}"
    of_64 = _parts(division.step(BATCH)) if division.full_batch >= BATCH else "no room"
    return (
        f"{cells}{division.num_kv_tokens:>11,}{_parts(division.step(1)):>{wide}}{of_64:>{wide}}{full:>19}"
        f"{division.tokens_per_second_per_chip:>19,.0f}"
    )


def _parts(step: DecodeStep) -> str:
    drafts = f" + {step.drafts:.2f}" if step.drafts else ""
    return f"{step.total:.2f} ({step.weights:.2f} + {step.kv + step.state:.2f} + {step.exchange:.2f}{drafts})"


def _width(division: Division) -> int:
    """Of a column of `_parts`."""
    drafts = division.measured["drafts"]
    return 36 if drafts and drafts["model"] else 28
