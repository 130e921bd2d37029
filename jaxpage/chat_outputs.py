"""Tools and reasoning in chats: what they add to a request, and how the output is parsed.

Knows parsers, the tokenizer and the options that choose them. Must not know the engine: `LLM.chat` and the server share
this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.config import EngineConfig
from jaxpage.outputs import RequestOutput
from jaxpage.reasoning import HARMONY, to_reasoning_config
from jaxpage.reasoning_parsers import OutputParser, make_reasoning_parser, starts_in_reasoning
from jaxpage.sampling_params import SamplingParams
from jaxpage.structured_outputs import StructuredOutputsParams
from jaxpage.tool_parsers import FORMATS, Delta, join, make, parser_for_template, tool_grammar
from jaxpage.tool_parsers.formats import ALIASES, OF_GPT_OSS

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a model writes tool calls and reasoning. None: it does not, or the format is unknown."""

    tool_parser: str | None
    reasoning_parser: str | None
    special_tokens: Mapping[
        str, int
    ]  # markers of tool calls that are special tokens, and their ids

    def params(self, params: SamplingParams, tools: Tools | None, choice: Any) -> SamplingParams:
        """The sampling params of a request with these tools. Raises ValueError.

        choice: "auto"; "none"; "required"; or {"type": "function", "function": {"name": ...}}.
        """
        if choice not in (None, "none", "auto"):
            if params.structured_outputs is not None:
                raise ValueError(
                    f"tool_choice={choice!r} constrains the output, and so do structured_outputs; leave one out"
                )
            grammar = tool_grammar(
                self._needed_tool_parser(choice), tools, choice, special_tokens=self.special_tokens
            )
            structured = StructuredOutputsParams(grammar=grammar)
            params = dataclasses.replace(params, structured_outputs=structured)
        if params.skip_special_tokens and self.parser(tools, choice).keeps_special_tokens:
            params = dataclasses.replace(params, skip_special_tokens=False)
        return params

    def parser(self, tools: Tools | None, choice: Any, prompt: str | None = None) -> OutputParser:
        """A parser for one output of a rendered prompt. Raises ValueError for invalid tools."""
        reasoning, name = None, self.reasoning_parser
        if name is not None:
            inside = starts_in_reasoning(name, prompt or "")
            reasoning = make_reasoning_parser(name, starts_in_reasoning=inside)
        calls = None
        if tools and choice != "none" and name not in HARMONY and self.tool_parser is not None:
            calls = make(self.tool_parser, tools)
        return OutputParser(reasoning, calls)

    def read(self, output: RequestOutput, tools: Tools | None, choice: Any) -> None:
        """Parse the texts of a finished output, and write the results into its completions."""
        for completion in output.outputs:
            parser = self.parser(tools, choice, output.prompt)
            deltas: list[Delta] = [*parser.feed(completion.text), *parser.finish()]
            found = join(deltas)
            completion.content = found.text
            completion.reasoning = found.reasoning or None
            completion.tool_calls = list(found.tool_calls)

    def _needed_tool_parser(self, choice: Any) -> str:
        if self.reasoning_parser in HARMONY:
            raise ValueError(f'tool_choice={choice!r} is not supported for gpt-oss; give "auto"')
        if self.tool_parser is None:
            raise ValueError(
                f"tool_choice={choice!r} needs to know how the model writes calls, and its chat template does not "
                f"tell; start the engine with tool_call_parser, one of {', '.join(FORMATS)}"
            )
        return self.tool_parser


def chat_format(config: EngineConfig, tokenizer: Any, chat_template: str | None) -> ChatFormat:
    """By the options, else by the chat template (None: the tokenizer's)."""
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):  # templates by name
        template = "\n".join(template.values())
    options = to_reasoning_config(config.reasoning_config)
    reasoning = options.reasoning_parser if options else ""
    name = config.tool_call_parser
    if name in OF_GPT_OSS:
        name, reasoning = None, reasoning or HARMONY[0]
    elif name is None:
        name = parser_for_template(template)
    else:
        name = ALIASES.get(name, name)
    return ChatFormat(
        tool_parser=name,
        reasoning_parser=reasoning or None,
        special_tokens=_special_tokens(name, tokenizer),
    )


def _special_tokens(name: str | None, tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    markers = FORMATS[name].markers if name is not None else ()
    special = {token.content: i for i, token in added.items() if token.special}
    return {marker: special[marker] for marker in markers if marker in special}
