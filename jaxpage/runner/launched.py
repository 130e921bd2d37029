"""A step in flight: its results on the device, and how they are copied to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpage.plan import StepResult
from jaxpage.runner.step_result import DeviceResult
from jaxpage.sampling.logprobs import Scores


@dataclass(frozen=True, kw_only=True)
class Executed:
    """Results of calls, which may still be computing."""

    sampled: DeviceResult | None = None  # by the last call that samples
    # (entries without padding, whether the whole vocabulary is wanted, scores) of each call
    scores: list[tuple[int, bool, Scores]] = field(default_factory=list)
    # (rows without padding, [R, V]) of each call
    vocabulary: list[tuple[int, jax.Array]] = field(default_factory=list)
    # (rows int32[n] of a piece of C tokens, [C, J, E] of J captured points) of each call
    captured: list[tuple[np.ndarray, jax.Array]] = field(default_factory=list)

    def arrays(self) -> list[Any]:
        """The jax.Arrays that `to_host` reads."""
        leaves = jax.tree.leaves((self.sampled, self.scores, self.vocabulary, self.captured))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


@dataclass(frozen=True)
class Launched:
    """A step in flight. `Runner.collect` turns it into a `StepResult`."""

    num_steps: int  # most tokens that a row may have sampled
    num_rows: int
    has_top_logprobs: bool
    result: Executed
    number: int = 0  # of the launch in a recording
    program: str = ""  # like `fill`, as in `StepResult`
    fill: float = 0.0


def to_host(launched: Launched) -> StepResult:
    """Wait for a launched step. Returns its result without padding."""
    steps, rows = launched.num_steps, launched.num_rows
    result = launched.result.sampled
    assert result is not None, "nothing was sampled"
    sampled = result.sampled
    token_ids = np.asarray(sampled.token_ids)[:steps, :rows]
    empty = np.zeros((steps, rows, 0), np.float32)
    top_token_ids, top_logprobs = empty.astype(np.int32), empty
    if launched.has_top_logprobs:
        top_token_ids = np.asarray(sampled.top_token_ids)[:steps, :rows]
        top_logprobs = np.asarray(sampled.top_logprobs)[:steps, :rows]
    return StepResult(
        token_ids=token_ids,
        num_sampled=np.asarray(result.num_sampled)[:rows],
        logprobs=np.asarray(sampled.logprobs)[:steps, :rows],
        ranks=np.asarray(sampled.ranks)[:steps, :rows],
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
        program=launched.program,
        fill=launched.fill,
        **({} if result.expert_load is None else {"expert_load": np.asarray(result.expert_load)}),
        **_scored(launched.result),
    )


def _scored(executed: Executed) -> dict[str, np.ndarray]:
    """The fields of a `StepResult` beyond the sampled tokens, as far as they were asked for."""

    def joined(parts: list[tuple[int, jax.Array]]) -> np.ndarray:
        return np.concatenate([np.asarray(part)[:num] for num, part in parts])

    found = {}
    if executed.vocabulary:
        found["vocabulary"] = joined(executed.vocabulary)
    if executed.captured:
        parts = [np.asarray(values)[rows] for rows, values in executed.captured]
        found["captured"] = np.concatenate(parts).astype(np.float32)
    if executed.scores:
        for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
            found[f"prompt_{name}"] = joined([(n, getattr(s, name)) for n, _, s in executed.scores])
        whole = [(num, scores.vocabulary) for num, whole, scores in executed.scores if whole]
        if whole:
            found["prompt_vocabulary"] = joined(whole)
    return found
