"""What `jaxpage bench serve` sends: prompts, the number of output tokens for each, and when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Which prompts are sent, and the number of output tokens for each."""

    dataset_name: Literal["random", "shared-prefix", "trace", "custom"] = "random"
    # lines of JSON: in a trace with timestamp, prompt or input_length, and output_length; in custom prompts with prompt
    # and optionally output_tokens
    dataset_path: Path | None = None
    tokenizer: str | None = None  # a folder; with it random prompts are texts, without it token ids
    # range of ids in random prompts: the first, and one past the last
    token_ids: tuple[int, int] = (256, 500)
    random_input_len: int = 1024  # tokens of a random prompt
    random_output_len: int = 128  # tokens wanted for a random prompt
    random_range_ratio: float = 0.0  # by how much lengths vary up and down, as a ratio
    num_prefixes: int = 10  # of `shared-prefix`
    prefix_len: int = 256  # tokens, of `shared-prefix`
    suffix_len: int = 256  # tokens, of `shared-prefix`: what follows the prefix
    output_len: int = 128  # for `shared-prefix`, and for custom prompts without output_tokens
    timestamp_unit: float = 1.0  # of a trace's timestamps, in seconds; 0.001: milliseconds


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request to send."""

    prompt: str | list[int]
    max_tokens: int
    at: float | None = None  # seconds after the first request, if the data has a timestamp


def draw(data: Dataset, number: int, seed: tuple[int, ...]) -> list[Call]:
    """`number` requests, or fewer if a file has no more. Raises ValueError for bad sizes and files."""
    _check(data)
    rng = np.random.default_rng(seed)
    make = _Prompts(data, rng)
    if data.dataset_name == "random":
        means = data.random_input_len, data.random_output_len
        lens = [_around(rng, mean, data.random_range_ratio, number) for mean in means]
        return [
            Call(prompt=make.prompt(make.ids(size)), max_tokens=wanted)
            for size, wanted in zip(*lens, strict=True)
        ]
    if data.dataset_name == "shared-prefix":
        prefixes = [make.ids(data.prefix_len) for _ in range(data.num_prefixes)]
        order = rng.permutation(number) % data.num_prefixes  # evenly distributed, in random order
        return [
            Call(
                prompt=make.prompt(prefixes[i] + make.ids(data.suffix_len)),
                max_tokens=data.output_len,
            )
            for i in order
        ]
    calls = list(islice(_from_file(data, make), number))
    if not calls:
        raise ValueError(f"{data.dataset_path} has no requests")
    return sorted(calls, key=lambda call: call.at or 0.0)


def arrivals(
    calls: list[Call], rate: float, burstiness: float, seed: tuple[int, ...]
) -> list[float]:
    """Seconds after the start at which each request is sent.

    A trace has timestamps. Otherwise intervals have a gamma distribution with `rate` requests a second on average,
    scaled so that the last request is sent after exactly their number over `rate`. `burstiness` is its shape: 1 is a
    Poisson process, less is bursty, infinity is perfectly regular.
    """
    if calls[0].at is not None:
        return [(call.at or 0.0) - calls[0].at for call in calls]
    if math.isinf(rate):
        return [0.0] * len(calls)
    intervals = np.full(len(calls), 1.0)
    if not math.isinf(burstiness):
        intervals = np.random.default_rng(seed).gamma(burstiness, size=len(calls))
    times = intervals.cumsum()
    if times[-1] == 0.0:  # so bursty that all intervals round to 0
        return [0.0] * len(calls)
    return (times * (len(calls) / rate / times[-1])).tolist()


class _Prompts:
    """Random prompts, according to the options."""

    def __init__(self, data: Dataset, rng: np.random.Generator) -> None:
        self._range, self._rng = data.token_ids, rng
        self._tokenizer: Any = None
        if data.tokenizer is not None:
            from jaxpage.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(data.tokenizer)

    def ids(self, length: int) -> list[int]:
        return self._rng.integers(*self._range, size=length).tolist()

    def prompt(self, ids: list[int]) -> str | list[int]:
        """The ids, or a text of about as many tokens: tokenising the text of some ids may give other ids."""
        if self._tokenizer is None:
            return ids
        again = self._tokenizer.encode(self._tokenizer.decode(ids), add_special_tokens=False)
        return self._tokenizer.decode(again[: len(ids)])


def _around(rng: np.random.Generator, mean: int, ratio: float, number: int) -> list[int]:
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    return rng.integers(max(low, 1), high + 1, size=number).tolist()


def _from_file(data: Dataset, make: _Prompts) -> Iterator[Call]:
    assert data.dataset_path is not None
    with data.dataset_path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _call(data, make, json.loads(line))
                except (ValueError, LookupError, TypeError) as error:
                    why = f"has no {error}" if isinstance(error, KeyError) else str(error)
                    raise ValueError(f"{data.dataset_path}, line {number}: {why}") from error


def _call(data: Dataset, make: _Prompts, fields: dict[str, Any]) -> Call:
    if data.dataset_name == "custom":
        prompt, at, wanted = fields["prompt"], None, fields.get("output_tokens", data.output_len)
    else:
        at, wanted = float(fields["timestamp"]) * data.timestamp_unit, fields["output_length"]
        prompt = fields.get("prompt")
        if prompt is None:
            prompt = make.prompt(make.ids(fields["input_length"]))
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f"the prompt must be a text or token ids, got {prompt!r}")
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"the number of output tokens must be at least 1, got {wanted!r}")
    return Call(prompt=prompt, max_tokens=wanted, at=at)


def _check(data: Dataset) -> None:
    path = data.dataset_path
    if (path is not None) != (data.dataset_name in ("trace", "custom")):
        needs = "takes no file: leave --dataset-path out" if path else "needs --dataset-path FILE"
        raise ValueError(f"the dataset {data.dataset_name} {needs}")
    if path is not None and not path.is_file():
        raise ValueError(f"there is no file {path}")
    names = ("random_input_len", "random_output_len", "num_prefixes", "output_len")
    for name in names:
        if getattr(data, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(data, name)}")
    if min(data.prefix_len, data.suffix_len) < 0 or data.prefix_len + data.suffix_len < 1:
        raise ValueError(
            f"prefix_len and suffix_len must not be negative, nor both 0, got {data.prefix_len} and {data.suffix_len}"
        )
    if not 0 <= data.random_range_ratio < 1:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {data.random_range_ratio}")
    if not 0 <= data.token_ids[0] < data.token_ids[1]:
        raise ValueError(f"token_ids must be two increasing numbers, got {data.token_ids}")
