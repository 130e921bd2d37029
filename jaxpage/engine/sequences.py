"""The life of one sequence: how it begins, takes its sampled tokens, and ends.

Knows one sequence and its params. Must not know its blocks, slots, other rows, or text.
"""

from __future__ import annotations

import numpy as np

from jaxpage.engine.block_pool import BlockPool
from jaxpage.kv_groups import most_blocks
from jaxpage.repetition import repeats_itself
from jaxpage.request import FinishReason, Request, Sequence


def new_sequence(request: Request, index: int, max_model_len: int) -> Sequence:
    """Continuation `index` of a request, which knows the prompt and has computed nothing."""
    return Sequence(
        request=request,
        index=index,
        token_ids=list(request.prompt_token_ids),
        max_len=max_len_of(request, max_model_len),
        num_reported_tokens=len(request.prompt_token_ids),
    )


def restart(request: Request) -> None:
    """Reset a request to its state at submission, so that another engine can answer it from the beginning."""
    request.sequences = []
    request.num_cached_tokens = request.num_cache_creation_tokens = 0
    request.num_preemptions = request.num_scored_tokens = 0
    request.first_scheduled_time = None
    for source in (request.beams, request.mask_source):
        if source is not None:
            source.restart()


def is_plain(request: Request) -> bool:
    """Whether the rows of a request need only its tokens, and it has a single sequence."""
    has_more = request.wants_vocabulary or request.scores_prompt or request.params.n > 1
    others = (request.beams, request.mask_source, request.prompt_embeds, request.pictures)
    return not has_more and all(x is None for x in (*others, request.captures))


def new_sibling(parent: Sequence, index: int) -> Sequence:
    """Continuation `index` of the request of `parent`, which has computed the prompt and any forced tokens after it."""
    return Sequence(
        request=parent.request,
        index=index,
        token_ids=list(parent.token_ids),
        max_len=parent.max_len,
        num_reported_tokens=parent.num_reported_tokens,
        num_captured_tokens=parent.num_captured_tokens,
        weight_starts=list(parent.weight_starts),
    )


def note_weights(sequence: Sequence, number: int) -> None:
    """Record that tokens are sampled with weights version `number` from here on."""
    start = sequence.num_known_tokens - len(sequence.request.prompt_token_ids)
    sequence.weight_starts.append((number, start))


def check_limits(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    decode_steps: int,
    policy: str,
) -> None:
    """Raise ValueError for limits with which no sequence could run, and for unknown policies.

    The shortest sequence has one prompt token and one output token.
    """
    if min(max_num_seqs, max_num_batched_tokens, max_model_len - 1, decode_steps) < 1:
        raise ValueError(
            f"{max_num_seqs=}, {max_num_batched_tokens=}, {decode_steps=} must be at least 1, "
            f"and {max_model_len=} at least 2"
        )
    if policy not in ("fcfs", "priority"):
        raise ValueError(f"policy {policy!r} is neither 'fcfs' nor 'priority'")


def check_runnable(
    request: Request, max_model_len: int, pool: BlockPool, max_query_len: int
) -> None:
    """Raise ValueError for a request that could not finish even with all blocks of the pool.

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
    """The number of tokens, prompt included, at which the request's sequences end."""
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)


def next_mask(sequence: Sequence) -> np.ndarray | None:
    """Which tokens a sequence may sample next. None: not known yet, for example while its last token is in flight."""
    source = sequence.request.mask_source
    if source is None or sequence.num_in_flight:
        return None
    return source.mask(sequence.index, sequence.output_token_ids)


def append_forced(sequence: Sequence) -> bool:
    """Append the tokens that a grammar forces next, as far as there is room. True if there are any.

    A stop id, and the last token that the sequence may have, are left to be sampled, so that they end it as usual.
    """
    request, token_ids = sequence.request, sequence.token_ids
    if request.mask_source is None or sequence.num_in_flight:
        return False
    ids = request.mask_source.forced(sequence.index, sequence.output_token_ids)
    room = max(0, sequence.max_len - 1 - len(token_ids))
    stop_at = next((i for i, x in enumerate(ids) if x in request.stop_token_ids), len(ids))
    ids = ids[: min(room, stop_at)]
    token_ids += ids
    sequence.num_unsent_tokens += len(ids)
    return bool(ids)


def append_tokens(sequence: Sequence, sampled: list[int]) -> list[int]:
    """Append the tokens that a row sampled, up to the one that ends the sequence, and return these.

    The order of checks is vLLM's: EOS, other stop ids, length, repetition; stop strings come later, in the text
    (`output_processor`). Stop ids need no check of min_tokens, because the device masks them until then.
    """
    request, token_ids = sequence.request, sequence.token_ids
    stop_ids, max_len = request.stop_token_ids, sequence.max_len
    looks_for_repetition = request.params.repetition_detection is not None
    for count, token_id in enumerate(sampled, start=1):
        token_ids.append(token_id)
        if token_id in stop_ids:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = None if token_id in request.eos_token_ids else token_id
        elif len(token_ids) >= max_len:
            sequence.finish_reason = FinishReason.LENGTH
        elif looks_for_repetition and _repeats_itself(sequence):
            sequence.finish_reason = FinishReason.REPETITION
            sequence.stop_reason = "repetition_detected"
        else:
            continue
        return sampled[:count]
    return sampled


def _repeats_itself(sequence: Sequence) -> bool:
    """Whether its output has min_tokens and ends with a repetition as its params define it."""
    params = sequence.request.params
    num_output = sequence.num_output_tokens
    assert params.repetition_detection is not None
    return num_output >= params.min_tokens and repeats_itself(
        sequence.token_ids, num_output, params.repetition_detection
    )


def cut_output(sequence: Sequence, num_tokens: int) -> None:
    """End a sequence whose text ended after `num_tokens` of its output tokens."""
    del sequence.token_ids[len(sequence.request.prompt_token_ids) + num_tokens :]
    sequence.finish_reason = FinishReason.STOP
