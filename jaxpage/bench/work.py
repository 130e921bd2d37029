"""What engines are compared on: the limits they are set up with, and the requests they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every engine is set up with."""

    threads: int
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests to be answered greedily, each with exactly its number of tokens: EOS is ignored."""

    prompts: list[list[int]]
    num_tokens: list[int]
    static_batch: int  # how many requests an engine without continuous batching takes at a time

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_tokens)
