"""Where two answers to one request differ, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.vllm_parity.engines import Answer, Request

TOLERANCE = 1e-4  # of logprobs, and of logits that count as equal
# A few logprobs of the demo model are further apart. In float64 they lie between: float32 is no more exact.
ROUNDING = 5e-4
WHY = (
    f"Two tokens whose logits are less than {TOLERANCE:g} apart, or logprobs that differ by {TOLERANCE:g} to "
    f"{ROUNDING:g}."
)
Entry = tuple[int, float, int | None, str | None]  # id, logprob, rank, text
Rows = list[list[Entry] | None] | None


@dataclass(frozen=True)
class Difference:
    """`where` names a field of the answer; `row` is a place in its list of logprobs or ids, of completion `index`."""

    where: str
    ours: Any
    theirs: Any
    index: int = 0
    row: int = 0


def is_close(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    return a == b or abs(a - b) < tolerance


def differences(ours: Answer, theirs: Answer) -> list[Difference]:
    """All of them, but of what follows from another one: behind other tokens everything is other."""
    for key in ("refused", "crashed"):
        if (key in ours) != (key in theirs):
            return [Difference(key, ours.get(key), theirs.get(key))]
        if key in ours:
            return []
    found = [
        Difference(key, ours[key], theirs[key])
        for key in ("prompt", "prompt_token_ids")
        if ours[key] != theirs[key]
    ]
    if len(ours["completions"]) != len(theirs["completions"]):
        count = Difference("num_outputs", len(ours["completions"]), len(theirs["completions"]))
        return [*found, count]
    if any(x.where == "prompt_token_ids" for x in found):
        return found
    found += _of_logprobs(ours, theirs, "prompt_logprobs", 0)
    pairs = zip(ours["completions"], theirs["completions"], strict=True)
    for index, (our, their) in enumerate(pairs):
        found += _of_completions(our, their, index)
    return found


def _of_completions(ours: Answer, theirs: Answer, index: int) -> Iterator[Difference]:
    if ours["token_ids"] != theirs["token_ids"]:
        a, b = ours["token_ids"], theirs["token_ids"]
        row = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
        if row >= 0:
            yield Difference("token_ids", a[row:], b[row:], index, row)
            return
        yield Difference("num_tokens", len(a), len(b), index)
    for key in ("text", "finish_reason", "stop_reason"):
        if ours[key] != theirs[key]:
            yield Difference(key, ours[key], theirs[key], index)
    if len(ours["token_ids"]) != len(theirs["token_ids"]):
        return
    a, b = ours["cumulative_logprob"], theirs["cumulative_logprob"]
    if (a is None) != (b is None) or (a is not None and not math.isclose(a, b, abs_tol=1e-3)):
        yield Difference("cumulative_logprob", a, b, index)
    yield from _of_logprobs(ours, theirs, "logprobs", index)


def _of_logprobs(ours: Answer, theirs: Answer, key: str, index: int) -> Iterator[Difference]:
    """Of the type of the container, and the first row with other ids, values, ranks or texts."""
    a, b = ours[key], theirs[key]
    for what, x, y in (
        ("type", ours[f"{key}_type"], theirs[f"{key}_type"]),
        ("length", None if a is None else len(a), None if b is None else len(b)),
    ):
        if x != y:
            yield Difference(f"{key} {what}", x, y, index)
            return
    seen = set()
    for row, (x, y) in enumerate(zip(a or (), b or (), strict=True)):
        for difference in _of_rows(x, y, key, index, row):
            if difference.where not in seen:
                seen.add(difference.where)
                yield difference


def _of_rows(
    ours: list[Entry] | None, theirs: list[Entry] | None, key: str, index: int, row: int
) -> Iterator[Difference]:
    a, b = ours or [], theirs or []
    if (ours is None) != (theirs is None) or len(a) != len(b):
        yield Difference(f"{key} entries", len(a), len(b), index, row)
        return
    if [x[0] for x in a] != [x[0] for x in b]:
        # The same place has another id: equally likely?
        off = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x[0] != y[0])
        if not all(is_close(x[1], y[1], ROUNDING) for x, y in zip(a, b, strict=True)):
            yield Difference(f"{key} ids", a[off:][:3], b[off:][:3], index, row)
            return
        yield Difference(f"{key} order of ties", a[off:][:3], b[off:][:3], index, row)
    theirs_by_id = {x[0]: x for x in b}
    for x in a:
        y = theirs_by_id.get(x[0])
        if y is None:
            continue
        if not is_close(x[1], y[1]):
            yield Difference(f"{key} values", x, y, index, row)
        if x[2] != y[2]:
            yield Difference(f"{key} ranks", x, y, index, row)
        if x[3] != y[3]:
            yield Difference(f"{key} texts", x, y, index, row)


def is_rounding(
    difference: Difference, request: Request, logits: Callable[[Request, str], Answer]
) -> bool:
    """Whether rounding explains it. Of other tokens and ranks: the candidates' logits, of all ids as jaxpage has them,
    are less than TOLERANCE apart.

    `logits`: see `engines.Jaxpage.logits`.
    """
    if difference.where.endswith("order of ties"):
        return True
    if difference.where.endswith("logprobs values"):
        return is_close(difference.ours[1], difference.theirs[1], ROUNDING)
    if difference.where == "token_ids":
        completions = logits(request, "processed_logits")["completions"]
        row = completions[difference.index]["logprobs"][difference.row]
        by_id = {entry[0]: entry[1] for entry in row}
        return abs(by_id[difference.ours[0]] - by_id[difference.theirs[0]]) < TOLERANCE
    if difference.where in ("logprobs ranks", "prompt_logprobs ranks"):
        answer = logits(request, "raw_logits")
        key = difference.where.split()[0]
        holder = answer if key.startswith("prompt") else answer["completions"][difference.index]
        row = holder[key][difference.row]
        own = next(entry[1] for entry in row if entry[0] == difference.ours[0])
        num_above = sum(entry[1] > own + TOLERANCE for entry in row)
        num_tied = sum(abs(entry[1] - own) <= TOLERANCE for entry in row)
        ranks = difference.ours[2], difference.theirs[2]
        return all(num_above < rank <= num_above + num_tied for rank in ranks)
    return False
