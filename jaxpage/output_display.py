"""Outputs in notebooks: tokens coloured by how likely they were, and a row for each in a pandas table."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.outputs import CompletionOutput, RequestOutput

_COLUMNS = ("index", "position", "token_id", "token", "logprob", "rank")
_TOKEN = (
    '<span style="background: rgba(255, 127, 14, {strength:.2f})" title="{title}">{text}</span>'
)


def rows_of(completion: CompletionOutput) -> list[tuple[Any, ...]]:
    """(index, position, token id, text, logprob, rank) of each token; the last three None without logprobs."""
    rows = []
    for position, token_id in enumerate(completion.token_ids):
        row = (None, None, None)
        if completion.logprobs is not None:
            entry = completion.logprobs[position][token_id]
            row = (entry.decoded_token, entry.logprob, entry.rank)
        rows.append((completion.index, position, token_id, *row))
    return rows


def to_table(output: RequestOutput) -> Any:
    """A pandas DataFrame of the tokens of all continuations. Needs pandas."""
    import pandas

    rows = [row for completion in output.outputs for row in rows_of(completion)]
    return pandas.DataFrame(rows, columns=list(_COLUMNS))


def to_html(output: RequestOutput) -> str:
    """The prompt in grey, and each continuation; the darker a token, the less likely it was."""
    prompt = output.prompt or f"{len(output.prompt_token_ids)} tokens"
    parts = [f'<div style="color: grey; white-space: pre-wrap">{escape(prompt)}</div>']
    parts += [
        f'<div style="white-space: pre-wrap">{_text(completion)} '
        f"<small>{escape(completion.finish_reason or 'running')}</small></div>"
        for completion in output.outputs
    ]
    return "".join(parts)


def _text(completion: CompletionOutput) -> str:
    rows = rows_of(completion)
    if not rows or any(text is None for _, _, _, text, _, _ in rows):
        return escape(completion.text)
    return "".join(
        _TOKEN.format(
            strength=0.8 * (1 - math.exp(min(logprob, 0.0))) if math.isfinite(logprob) else 0.8,
            title=escape(f"{token_id}: logprob {logprob:.3f}, rank {rank}"),
            text=escape(text),
        )
        for _, _, token_id, text, logprob, rank in rows
    )
