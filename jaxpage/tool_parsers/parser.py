"""A parser: what a format's reader finds in one output, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpage.tool_parsers.call_grammar import CallGrammar
from jaxpage.tool_parsers.deltas import Delta
from jaxpage.tool_parsers.source import Reading, Source
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer


@dataclass(frozen=True, kw_only=True)
class Format:
    """How calls are written by some models."""

    # reads a whole output
    read: Callable[[Source, Writer, tuple[Tool, ...]], Reading[None]]
    # how a call is forced, given the ids of markers that are special tokens
    grammar: Callable[[Mapping[str, int]], CallGrammar]
    markers: tuple[
        str, ...
    ] = ()  # that have tokens of their own, as far as a model's tokenizer has them
    # Some of them are special tokens, at least of some models: the text must be decoded with them.
    keeps_special_tokens: bool
    separators: str = ""  # may stand between calls, and mean nothing


class Parser:
    """Reads one output: `feed` it in pieces of any size, then `finish`.

    What the deltas say, joined, does not depend on the pieces. What is no call comes out as text, as it was written,
    and what is out is never taken back. A call begins when its name and the beginning of its arguments are known. If
    these break off or go wrong, the pieces that are out remain an incomplete call, and the rest is text.
    """

    def __init__(
        self,
        read: Callable[[Source, Writer], Reading[None]],
        *,
        keeps_special_tokens: bool,
        separators: str = "",
    ):
        self.keeps_special_tokens = keeps_special_tokens
        self._source = Source()
        self._writer = Writer(separators)
        self._reading = read(self._source, self._writer)

    def feed(self, new_text: str) -> list[Delta]:
        """What is certain now that `new_text` has come."""
        assert not self._source.ended, "the output has ended"
        self._source.add(new_text)
        next(self._reading)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """No more text will come: what was held back."""
        assert not self._source.ended, "the output has ended"
        self._source.ended = True
        next(self._reading, None)
        self._writer.end()
        return self._writer.take()
