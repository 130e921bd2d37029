"""A sequence apart from where it lives: how it begins, takes its sampled tokens, and ends.

What this file knows: one sequence, its params and its row of a result. What it must never learn:
which blocks it has, slots, other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpage.engine.block_pool import BlockPool
from jaxpage.kv_groups import most_blocks
from jaxpage.outputs import Logprob
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request, Sequence


def new_sequence(request: Request, index: int, max_model_len: int, detokenizer: Any) -> Sequence:
    """Continuation `index` of a request: it knows the prompt and has computed nothing."""
    params = request.params
    return Sequence(
        request=request,
        index=index,
        token_ids=list(request.prompt_token_ids),
        max_len=max_len_of(request, max_model_len),
        logprobs=None if params.logprobs is None else [],
        detokenizer=detokenizer,
    )


def check_runnable(
    request: Request, max_model_len: int, pool: BlockPool, max_query_len: int
) -> None:
    """Raise ValueError for a request that could not end even if it had all blocks of the pool.

    A step computes at most `max_query_len` tokens of a sequence.
    """
    prompt_len = len(request.prompt_token_ids)
    if prompt_len == 0:
        raise ValueError(f"request {request.request_id!r} has an empty prompt")
    embeds = request.prompt_embeds
    if embeds is not None and len(embeds) != prompt_len:
        raise ValueError(
            f"request {request.request_id!r} has {len(embeds)} embeddings for a prompt of "
            f"{prompt_len} tokens; each token id needs one"
        )
    if prompt_len >= max_model_len:
        raise ValueError(
            f"a prompt of {prompt_len} tokens leaves no room for an answer within "
            f"max_model_len={max_model_len}; shorten it or raise max_model_len"
        )
    max_len = max_len_of(request, max_model_len)
    # The last token's KV is never needed.
    needed = most_blocks(pool.windows, max_len - 1, pool.block_size, max_query_len)
    if needed > pool.num_usable:
        raise ValueError(
            f"a prompt of {prompt_len} tokens with its answer, {max_len} tokens in all, needs "
            f"{needed} blocks of {pool.block_size}, but the pool has {pool.num_usable}; lower max_tokens "
            f"or give the pool more memory"
        )


def max_len_of(request: Request, max_model_len: int) -> int:
    """Tokens, prompt included, at which the request's sequences end."""
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)


def next_mask(sequence: Sequence) -> np.ndarray | None:
    """Which tokens a sequence may sample next. None: not known yet, perhaps because its last token is in flight."""
    source = sequence.request.mask_source
    if source is None or sequence.num_in_flight:
        return None
    return source.mask(sequence.index, sequence.output_token_ids)


def append_tokens(sequence: Sequence, token_ids: list[int], result: StepResult, row: int) -> int:
    """Append the tokens a row sampled, up to the one that ends the sequence; returns how many.

    Tokens after the end are dropped: the device goes on until it meets a stop id or `max_len`, it
    knows no stop strings.
    """
    request = sequence.request
    logprobs, width = sequence.logprobs, request.params.logprobs or 0
    plain = sequence.detokenizer is None
    stop_ids, max_len, known = request.stop_token_ids, sequence.max_len, sequence.token_ids
    for step, token_id in enumerate(token_ids):
        known.append(token_id)
        if logprobs is not None:
            logprobs.append(_best(token_id, width, result, step, row))
            sequence.cumulative_logprob += logprobs[-1][token_id].logprob
        # The usual token ends nothing and has no text to look at.
        if plain and token_id not in stop_ids and len(known) < max_len:
            continue
        _check_end(sequence, token_id)
        if sequence.finish_reason is not None:
            return step + 1
    return len(token_ids)


def _check_end(sequence: Sequence, token_id: int) -> None:
    """Set finish and stop reason if the last token ends the sequence. Order of the checks: vLLM's.

    EOS, then the other stop ids, then length, then stop strings, which win over all of them because
    vLLM looks for them last, in the text. Ids need no min_tokens guard: the device masks them until
    then.
    """
    request = sequence.request
    is_stop_id = token_id in request.stop_token_ids
    if is_stop_id:
        sequence.finish_reason = FinishReason.STOP
        sequence.stop_reason = None if token_id in request.eos_token_ids else token_id
    elif len(sequence.token_ids) >= sequence.max_len:
        sequence.finish_reason = FinishReason.LENGTH
    if sequence.detokenizer is not None:
        past_min_tokens = sequence.num_output_tokens > request.params.min_tokens
        stop = sequence.detokenizer.append(token_id, ends=is_stop_id, check_stop=past_min_tokens)
        if stop is not None:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = stop


def _best(token_id: int, width: int, result: StepResult, step: int, row: int) -> dict[int, Logprob]:
    """The sampled token's logprob, and those of the best `width` ids (-1: all that came)."""
    sampled = Logprob(float(result.logprobs[step, row]), int(result.ranks[step, row]))
    best = {token_id: sampled}
    ids = result.top_token_ids[step, row].tolist()
    values = result.top_logprobs[step, row].tolist()
    count = len(ids) if width == -1 else width
    for rank, (top_id, value) in enumerate(zip(ids[:count], values[:count], strict=True), start=1):
        best.setdefault(top_id, Logprob(value, rank))
    return best
