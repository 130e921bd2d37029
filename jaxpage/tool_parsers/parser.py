"""Incremental parsing of one output with a format's reader."""

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
    """How some models write calls."""

    # Reads a whole output.
    read: Callable[[Source, Writer, tuple[Tool, ...]], Reading[None]]
    # Grammar that forces calls, given the ids of markers that are special tokens.
    grammar: Callable[[Mapping[str, int]], CallGrammar]
    markers: tuple[str, ...] = ()  # may be single tokens, depending on the tokenizer
    # Some markers are special tokens, at least for some models: the text must be decoded with special tokens.
    keeps_special_tokens: bool
    separators: str = ""  # may stand between calls; they are ignored


class Parser:
    """Reads one output: call `feed` with pieces of any size, then `finish`.

    The joined deltas do not depend on the pieces. Text that is not a call is returned as it was written, and a delta is
    never taken back. A call begins when its name and the beginning of its arguments are known. If the arguments are cut
    off or become invalid, the deltas returned so far remain as an incomplete call, and the rest is text.
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
        """The deltas that are certain after `new_text`."""
        assert not self._source.ended, "the output has ended"
        self._source.add(new_text)
        next(self._reading)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """The output has ended: the deltas that were held back."""
        assert not self._source.ended, "the output has ended"
        self._source.ended = True
        next(self._reading, None)
        self._writer.end()
        return self._writer.take()
