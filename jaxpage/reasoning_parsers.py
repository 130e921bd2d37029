"""Reasoning in the text of outputs, and outputs of reasoning followed by tool calls.

vLLM's reasoning parsers `qwen3`, `deepseek_r1`, `gemma4`, `glm45` (also `glm47`), `minimax_m2` and `gpt_oss` (also
`openai_gptoss`). The side of token ids is `jaxpage.reasoning`. Must not know tokens, requests or the engine.
"""

from __future__ import annotations

from jaxpage.reasoning import ALWAYS_REASON, HARMONY, MARKERS, PARSERS
from jaxpage.tool_parsers import Delta, Parser, TextDelta
from jaxpage.tool_parsers.gemma4_grammar import BEGIN as GEMMA4_CALL
from jaxpage.tool_parsers.harmony import read_messages
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_rest, read_until
from jaxpage.tool_parsers.writer import Writer

# Some models may call a tool without ending their reasoning first. Qwen3.5 does so in qwen3_coder's format.
_IMPLICIT_ENDS = {
    "qwen3": "<tool_call>\n<function=",
    "glm45": "<tool_call>",
    "glm47": "<tool_call>",
    "minimax_m2": "<minimax:tool_call>",
}
# Whether the markers of these are special tokens depends on the tokenizer; vLLM keeps special tokens, too.
_KEEP_SPECIAL_TOKENS = ("glm45", "glm47", "minimax_m2")

_CHANNEL, _CHANNEL_END = MARKERS["gemma4"]
_THOUGHT = "thought"  # the channel's name, on a line of its own
_OUTSIDE = Markers(_CHANNEL, _CHANNEL_END)
_INSIDE = Markers(_CHANNEL, _CHANNEL_END, GEMMA4_CALL)


def make_reasoning_parser(name: str, *, starts_in_reasoning: bool = False) -> Parser:
    """A parser for one output: ReasoningDelta for reasoning, TextDelta for what follows, as it was written.

    `starts_in_reasoning`: the prompt ends within reasoning, as the function of that name tells. Otherwise an output
    reasons if it begins with the start marker; with deepseek_r1 and minimax_m2 it always does. Reasoning need not end.

    gemma4 may reason at any place. gpt_oss writes tool calls in channels of their own: its parser reads them too.

    Raises ValueError for a name that is not known.
    """
    if name not in PARSERS:
        names = ", ".join(sorted(PARSERS))
        raise ValueError(f"reasoning parser {name!r} is not known; there are {names}")
    if name in HARMONY:
        return Parser(read_messages, keeps_special_tokens=True)
    inside = starts_in_reasoning or name in ALWAYS_REASON
    if name == "gemma4":
        return Parser(
            lambda source, writer: _read_channels(source, writer, inside=inside),
            keeps_special_tokens=True,
        )
    start, end = MARKERS[name]
    ends = (end, _IMPLICIT_ENDS[name]) if name in _IMPLICIT_ENDS else (end,)
    return Parser(
        lambda source, writer: _read_thinking(source, writer, start, ends, inside=inside),
        keeps_special_tokens=name in _KEEP_SPECIAL_TOKENS,
    )


def _read_thinking(
    source: Source, writer: Writer, start: str, ends: tuple[str, ...], *, inside: bool
) -> Reading[None]:
    source.hold()
    yield from source.run(SPACE)
    if (yield from source.match(start)):
        source.take_held()
        inside = True
    if inside:
        writer.reasoning(source.take_held())
        marker = yield from read_until(source, Markers(*ends), writer.reasoning)
        source.take_held()
        if marker != ends[0]:
            source.pos -= len(marker)
    else:
        writer.text(source.take_held())
    yield from read_rest(source, writer.text)


def _read_channels(source: Source, writer: Writer, *, inside: bool) -> Reading[None]:
    """A call ends a channel, too. What begins or ends one where none can is dropped, as in vLLM."""
    while True:
        if inside:
            label = yield from source.match(f"{_THOUGHT}\n", f"{_THOUGHT}{_CHANNEL_END}")
            if label.endswith(_CHANNEL_END):
                source.pos -= len(_CHANNEL_END)
        markers, write = (_INSIDE, writer.reasoning) if inside else (_OUTSIDE, writer.text)
        marker = yield from read_until(source, markers, write)
        source.take_held()
        if not marker:
            return
        if marker == GEMMA4_CALL:
            source.pos -= len(marker)
        inside = marker == _CHANNEL


def starts_in_reasoning(name: str, prompt: str) -> bool:
    """Whether a rendered prompt ends with the parser's start marker: the output begins within reasoning."""
    prompt = prompt.rstrip()
    if name == "gemma4":
        prompt = prompt.removesuffix(_THOUGHT)
    return name in MARKERS and prompt.endswith(MARKERS[name][0])


class OutputParser:
    """Reasoning, then text and tool calls: what the reasoning parser leaves as text goes to the tool parser.

    Either may be None. With gpt_oss, whose parser reads calls itself, give no tool parser.
    """

    def __init__(self, reasoning: Parser | None = None, tools: Parser | None = None):
        self._reasoning = reasoning
        self._tools = tools

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must be decoded with its special tokens."""
        return any(p is not None and p.keeps_special_tokens for p in (self._reasoning, self._tools))

    def feed(self, new_text: str) -> list[Delta]:
        """What is certain now that `new_text` has come."""
        if self._reasoning is None:
            return self._read_calls([TextDelta(new_text)])
        return self._read_calls(self._reasoning.feed(new_text))

    def finish(self) -> list[Delta]:
        """No more text will come: what was held back."""
        deltas = [] if self._reasoning is None else self._read_calls(self._reasoning.finish())
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _read_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, TextDelta) else [delta]
        return found
