"""Logprobs of a whole output in a few arrays instead of a dict for each token: vLLM's `FlatLogprobs`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

from jaxpage.outputs import Logprob


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Reads like the list of dicts. Attributes are vLLM's: token i has the entries `start_indices[i]` up to
    `end_indices[i]` of `token_ids`, `logprobs`, `ranks` and `decoded_tokens`. The first token of a prompt has none, {}.
    """

    def __init__(self) -> None:
        self.start_indices, self.end_indices = array("q"), array("q")
        self.token_ids, self.logprobs = array("i"), array("f")
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, entries: dict[int, Logprob] | None) -> None:
        """The entries of the next token, in order."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (entries or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for i in range(*index.indices(len(self))):
                part.append(self[i])
            return part
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in entries
        }

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
