"""`Scored`: the log-probabilities of given tokens, as padded arrays; and the parameters of requests for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Scored:
    """N sequences of up to L tokens, padded on the right with 0. A first token has no logprobs either, so also 0."""

    logprobs: np.ndarray  # float32[N, L]: of each token, or of its target, given those before it
    lengths: np.ndarray  # int32[N]
    top_token_ids: np.ndarray  # int32[N, L, K]: the most likely ones in its place, best first
    top_logprobs: np.ndarray  # float32[N, L, K]


def scoring_params(
    token_ids: Sequence[Sequence[int]], targets: Sequence[Sequence[int]] | None, top_k: int
) -> list[SamplingParams]:
    """The parameters of a request for each sequence. Raises ValueError for what cannot be scored."""
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    options: dict[str, Any] = {
        "max_tokens": 1,
        "detokenize": False,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "prompt_logprobs": top_k,
    }
    if targets is None:
        return [SamplingParams(**options)] * len(token_ids)
    if len(targets) != len(token_ids):
        raise ValueError(f"there are {len(targets)} targets for {len(token_ids)} sequences")
    for index, (tokens, wanted) in enumerate(zip(token_ids, targets, strict=True)):
        if len(wanted) != len(tokens) or len(tokens) < 2:
            raise ValueError(
                f"sequence {index} has {len(tokens)} tokens and {len(wanted)} targets; give one target for each token, "
                "and at least 2 tokens"
            )
    return [
        SamplingParams(**options, prompt_logprob_token_ids=[[each] for each in wanted[1:]])
        for wanted in targets
    ]


def make_scored(outputs: Sequence[RequestOutput], top_k: int) -> Scored:
    """Arrays from the final outputs of such requests."""
    lengths = np.array([len(output.prompt_token_ids) for output in outputs], np.int32)
    shape = (len(outputs), int(lengths.max(initial=0)))
    scored = Scored(
        logprobs=np.zeros(shape, np.float32),
        lengths=lengths,
        top_token_ids=np.zeros((*shape, top_k), np.int32),
        top_logprobs=np.zeros((*shape, top_k), np.float32),
    )
    for row, (output, length) in enumerate(zip(outputs, lengths.tolist(), strict=True)):
        flat: Any = output.prompt_logprobs
        starts, ends = np.asarray(flat.start_indices), np.asarray(flat.end_indices)
        values, ids = np.asarray(flat.logprobs, np.float32), np.asarray(flat.token_ids, np.int32)
        of_targets = output.prompt_token_id_logprobs
        # The first entry of a token is its own.
        own = values[starts[1:]] if of_targets is None else of_targets[:, 0]
        scored.logprobs[row, 1:length] = own
        for i in range(1, length) if top_k else ():
            entries = slice(starts[i], ends[i])
            best = np.argsort(-values[entries], kind="stable")[:top_k]
            scored.top_token_ids[row, i] = ids[entries][best]
            scored.top_logprobs[row, i] = values[entries][best]
    return scored
