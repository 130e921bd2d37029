"""gpt-oss's harmony, vLLM's `openai` tool parser and `openai_gptoss` reasoning parser: messages in channels.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`. `<|return|>` and `<|call|>` end an output, so they may be missing.
"""

from __future__ import annotations

import re

from jaxpage.tool_parsers.json_text import read_arguments
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.writer import Writer

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADERS = Markers(_START, _CHANNEL)
_HEADER_ENDS = Markers(_MESSAGE, _START, *_ENDS)
_MESSAGE_ENDS = Markers(_START, *_ENDS)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_TEXT_CHANNELS = ("final", "commentary")


def read_messages(source: Source, writer: Writer) -> Reading[None]:
    """The analysis channel is reasoning, and so are calls of tools that are not functions; the rest is text or calls.

    Messages of a kind are separated by a line break, as in vLLM.
    """
    separators = {writer.text: "", writer.reasoning: ""}
    source.hold()
    yield from source.run(SPACE)
    # The recipient may be part of the role, which begins in the prompt.
    begun = yield from source.match("to=")
    if not begun:
        writer.text(source.take_held())
    while begun or (yield from read_until(source, _HEADERS, writer.text)):
        begun = ""
        header = yield from _read_header(source, writer)
        recipient = _RECIPIENT.search(header)
        if recipient:
            yield from _read_call(source, writer, recipient.group(1), header)
        elif header:
            write = writer.text if _is_text(header) else writer.reasoning
            if (yield from source.more()):
                write(separators[write])
                separators[write] = "\n"
            marker = yield from read_until(source, _MESSAGE_ENDS, write)
            source.take_held()
            if marker == _START:
                source.pos -= len(_START)


def _read_header(source: Source, writer: Writer) -> Reading[str]:
    """A header up to `<|message|>`; its beginning is held. Returns "" if there is no `<|message|>`: then it is text."""
    pieces = [source.take_held()]
    marker = yield from read_until(source, _HEADER_ENDS, pieces.append)
    source.take_held()
    if marker == _START:  # another header
        source.pos -= len(_START)
    else:
        pieces.append(marker)
    header = "".join(pieces)
    if marker == _MESSAGE:
        return header
    writer.text(header)
    return ""


def _is_text(header: str) -> bool:
    channel = _CHANNEL_NAME.search(header)
    return "to=" not in header and channel is not None and channel.group(1) in _TEXT_CHANNELS


def _read_call(source: Source, writer: Writer, name: str, header: str) -> Reading[None]:
    """A message to a function. If its content is not an object, it is text, with its header."""
    source.hold()
    yield from source.run(SPACE)
    if (yield from source.peek()) != "{":
        writer.text(header)
    elif (yield from read_arguments(source, writer, name)):
        yield from source.run(SPACE)
        if (yield from source.match(*_ENDS)):
            source.take_held()
    writer.text(source.take_held())
