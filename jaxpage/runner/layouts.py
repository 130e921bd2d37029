"""What is uploaded for each program, as fields of one buffer. `pack` fills them."""

from __future__ import annotations

from typing import Any

from jaxpage.runner.buckets import Bucket, draft_name, sample_name, verify_name
from jaxpage.runner.calls import (
    ADMIT,
    COPY_STATES,
    MASKS_PER_CALL,
    SCORE,
    SET_MASKS,
    SET_TOKENS,
    STATES_PER_CALL,
    TOKENS_PER_CALL,
    VOCABULARY,
    VOCABULARY_ROWS,
)
from jaxpage.runner.encoder import picture_fields
from jaxpage.runner.layout import Field, Layout
from jaxpage.runner.slots import admission_layout
from jaxpage.runner.spec import PictureSpec, StepSpec


def layouts_of(spec: StepSpec, buckets: tuple[Bucket, ...]) -> dict[str, Layout]:
    """The uploads of each program, by its name."""
    sizes: dict[str, Any] = {
        "block_size": spec.block_size,
        "decode_steps": spec.decode_steps,
        "num_groups": len(spec.groups.windows),
        "num_drafts": spec.num_drafts,
        "has_draft_model": spec.has_draft_model,
    }
    row_sizes = sample_sizes(buckets)
    most_tokens = max(bucket.num_tokens for bucket in buckets)
    return {
        ADMIT: admission_layout(spec),
        SET_MASKS: masks_layout(spec.vocab_size),
        SET_TOKENS: tokens_layout(),
        SCORE: score_layout(spec.num_scored),
        VOCABULARY: vocabulary_layout(),
        **({COPY_STATES: states_layout()} if spec.num_cached_states else {}),
        **{b.name: step_layout(b, pictures=spec.pictures, **sizes) for b in buckets},
        **{sample_name(rows): rows_layout(rows) for rows in row_sizes},
        **{verify_name(n): rows_layout(n, has_drafts=True) for n in row_sizes},
        # Of any step that has so many rows.
        **{draft_name(n): step_layout(Bucket(most_tokens, n, False), **sizes) for n in row_sizes},
    }


def sample_sizes(buckets: tuple[Bucket, ...]) -> tuple[int, int]:
    """Rows of the `sample` programs."""
    return buckets[-1].sample_rows(1), buckets[-1].num_rows


def step_layout(
    bucket: Bucket,
    *,
    block_size: int,
    decode_steps: int,
    num_groups: int = 1,
    pictures: PictureSpec | None = None,
    num_drafts: int = 0,
    has_draft_model: bool = False,
) -> Layout:
    """What is uploaded for one step of a bucket. num_drafts: most of a row; has_draft_model: it makes them, so they are
    not uploaded.

    In each KV-cache group a row gains at most one block for each `block_size` of its new tokens, one because they may
    start within a block, and one for a copy-on-write; `num_updates` follows from that.
    """
    rows = bucket.num_rows
    new_tokens = rows * decode_steps if bucket.decode else bucket.num_tokens
    num_updates = num_groups * (new_tokens // block_size + 2 * rows)
    uploads_drafts = num_drafts and not has_draft_model
    return Layout(
        (
            *rows_layout(rows, has_drafts=num_drafts > 0).fields,
            *([Field("drafts", (rows, num_drafts))] if uploads_drafts else []),
            Field("update_slots", (num_updates,)),  # padding: the null slot's entry 0
            Field("update_groups", (num_updates,)),
            Field("update_indices", (num_updates,)),
            Field("update_blocks", (num_updates,)),
            Field("copy_sources", (num_groups * rows,)),  # padding: the null block onto itself
            Field("copy_destinations", (num_groups * rows,)),
            *picture_fields(None if bucket.decode else pictures, bucket.num_tokens),
        )
    )


def rows_layout(num_rows: int, *, has_drafts: bool = False) -> Layout:
    """What is uploaded to sample for a number of rows. has_drafts: rows may have drafts."""
    return Layout(
        (
            Field("features"),
            Field("num_steps"),
            Field("slots", (num_rows,)),  # padding: NULL_SLOT
            Field("starts", (num_rows,)),
            Field("num_tokens", (num_rows,)),  # padding: 0
            Field("samples", (num_rows,)),  # 0 or 1
            *([Field("num_drafts", (num_rows,))] if has_drafts else []),
        )
    )


def masks_layout(vocab_size: int) -> Layout:
    """The tokens that some slots may sample next; padding goes to the null slot, which never samples."""
    return Layout(
        (
            Field("slots", (MASKS_PER_CALL,)),
            Field("masks", (MASKS_PER_CALL, -(-vocab_size // 32)), "uint32"),
        )
    )


def tokens_layout() -> Layout:
    """Tokens that the host appended to running sequences; padding goes to the null slot's first token."""
    size = (TOKENS_PER_CALL,)
    return Layout((Field("slots", size), Field("positions", size), Field("token_ids", size)))


def states_layout() -> Layout:
    """Recurrent states to copy, one after the other."""
    size = (STATES_PER_CALL,)
    return Layout((Field("num"), Field("sources", size), Field("destinations", size)))


def score_layout(num_scored: int) -> Layout:
    """Tokens to score: their rows in a piece of hidden states, and the id of the token that follows each."""
    return Layout(
        (
            Field("num"),  # without padding
            # 0 or 1: whether the log-probabilities of the whole vocabulary are wanted
            Field("whole"),
            Field("rows", (num_scored,)),
            Field("token_ids", (num_scored,)),
        )
    )


def vocabulary_layout() -> Layout:
    """Rows that are about to sample, and how many of them are not padding."""
    return Layout((*rows_layout(VOCABULARY_ROWS).fields, Field("num")))
