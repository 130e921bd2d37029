"""Conversations as chat templates expect them: OpenAI's messages made plain, rendered to text.

Knows messages and templates. Must not know tokens, requests or the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxpage.pictures.messages import MediaPart

if TYPE_CHECKING:
    from jinja2 import nodes

logger = logging.getLogger(__name__)

CONTENT_FORMATS = ("auto", "string", "openai")
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")


def check_conversations(messages: Any) -> list[Sequence[Any]]:
    """One conversation or many as a list of conversations. Raises ValueError for anything else."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        if messages and isinstance(messages[0], Mapping):
            return [messages]
        if all(isinstance(x, Sequence) and not isinstance(x, str | bytes) for x in messages):
            return list(messages)
    raise ValueError(
        'messages must be a list of dicts such as {"role": "user", "content": "..."}, or a list of '
        f"such lists, got {messages!r}"
    )


def render(
    conversation: Sequence[Any],
    tokenizer: Any,
    *,
    chat_template: str | None,
    content_format: str = "auto",
    tools: list[Any] | None = None,
    **options: Any,
) -> str:
    """The text of a conversation; `options` go to the template.

    `content_format` says what the template gets as a message's content: "string", "openai" (a list
    of parts), or "auto": parts if the template iterates over the content. Raises ValueError.
    """
    try:
        source = tokenizer.get_chat_template(chat_template, tools)
    except Exception as error:  # transformers raises ValueError; other tokenizers anything
        raise ValueError(f"there is no chat template: {error}") from error
    if content_format == "auto":
        content_format = detect_content_format(source)
    wants_parts = content_format == "openai"
    messages = [_normalise(message, wants_parts=wants_parts) for message in conversation]
    if not any(f"{quote}developer{quote}" in source for quote in "'\""):
        messages = _without_developers(messages, wants_parts=wants_parts)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, chat_template=source, tools=tools, **options
        )
    except Exception as error:  # whatever the template runs into
        raise ValueError(f"the chat template cannot render the messages: {error}") from error


def _normalise(message: Any, *, wants_parts: bool) -> dict[str, Any]:
    """A fresh message with content of the wanted form, and arguments of tool calls as dicts."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f'a message must be a dict with "role" and "content", got {message!r}')
    plain = dict(message)
    parts = _text_parts(message)
    if wants_parts and message["role"] != "tool":  # templates expect tools to answer in text
        plain["content"] = parts
    else:
        if any(isinstance(part, MediaPart) for part in parts):
            raise ValueError(
                "the chat template expects text alone, but the message has a picture; give a chat_template that "
                "iterates over the content, in messages of the user"
            )
        plain["content"] = _joined(parts)
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise ValueError(f"tool_calls of a message must be a list, got {calls!r}")
            plain["tool_calls"] = [_tool_call(call) for call in calls]
        else:
            plain.pop("tool_calls", None)
        names = ("reasoning", "reasoning_content")  # the second is older; templates know either
        reasoning = next((message[n] for n in names if message.get(n) is not None), None)
        if reasoning is not None:
            plain |= dict.fromkeys(names, reasoning)
    return plain


def _without_developers(
    messages: list[dict[str, Any]], *, wants_parts: bool
) -> list[dict[str, Any]]:
    """The messages of developers as the system's, and if there are any, all of the system in one at the beginning.

    As in vLLM: many templates know only one system message, the first. Raises ValueError for pictures that would move:
    they must stay in the order of the conversation.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    roles = ("system", "developer")
    system = [message for message in messages if message["role"] in roles]
    if len(system) == 1 and system[0] is messages[0]:
        first = {name: value for name, value in system[0].items() if name != "tools"}
    else:
        if any(isinstance(part, MediaPart) for message in system for part in _text_parts(message)):
            raise ValueError(
                "a developer or system message has a picture, and the chat template needs these messages as one at "
                "the beginning; give the picture in messages of the user"
            )
        text = "\n\n".join(text for message in system if (text := text_of(message)))
        first = {"content": [{"type": "text", "text": text}] if wants_parts else text}
    others = [message for message in messages if message["role"] not in roles]
    return [first | {"role": "system"}, *others]


def text_of(message: Mapping[str, Any]) -> str:
    """The texts of a message. Raises ValueError for content that is none."""
    return _joined([part for part in _text_parts(message) if not isinstance(part, MediaPart)])


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["text"])


def _text_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise ValueError(f"content must be a str, a list of parts or None, got {content!r}")
    return [_text_part(part) for part in content]


def _text_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, MediaPart):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXT_TYPES:
        raise ValueError(f"only text can be in a message, got {part!r}")
    key = part["type"] if part.get("type") in ("refusal", "thinking") else "text"
    if not isinstance(part.get(key), str):
        raise ValueError(f'a content part must have "{key}" of type str, got {dict(part)!r}')
    return {k: v for k, v in part.items() if k != key} | {"type": "text", "text": part[key]}


def _tool_call(call: Any) -> dict[str, Any]:
    """OpenAI has the arguments as JSON text; templates expect a dict, and encode it themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f'a tool call must be {{"type": "function", "function": {{...}}}}, got {call!r}'
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):  # as vLLM: one bad turn must not end the conversation
        logger.warning("the arguments of tool call %r are no JSON object", function.get("name"))
        arguments = {}
    return dict(call) | {"function": dict(function) | {"arguments": dict(arguments)}}


@lru_cache(maxsize=32)
def detect_content_format(chat_template: str) -> str:
    """ "openai" if the template loops over the content of a message, else "string"; vLLM's rules."""
    try:
        # Not public, but it knows transformers' own extensions of the language.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        root = _compile_jinja_template(chat_template).environment.parse(chat_template)
    except Exception:  # rendering says what is wrong
        return "string"
    return "openai" if any(_loops_over_content(root)) else "string"


def _loops_over_content(root: nodes.Template) -> Iterator[nodes.For]:
    from jinja2 import nodes

    messages = _aliases(root, "messages")
    items = {
        loop.target.name
        for loop in root.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in items)

    in_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        parameters = _parameters_that_get(root, macro, is_content)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if any(_reads(loop.iter, name) for name in parameters):
                yield loop
    for loop in root.find_all(nodes.For):
        # The usual local variable of that name, which may have been set in a branch.
        is_local = id(loop) not in in_macros and _reads(loop.iter, "content")
        if is_local or is_content(loop.iter):
            yield loop


def _parameters_that_get(root: nodes.Template, macro: nodes.Macro, is_content: Any) -> set[str]:
    """Parameters of a macro to which some call passes the content of a message."""
    from jinja2 import nodes

    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            found |= {
                p.name for p, arg in zip(macro.args, call.args, strict=False) if is_content(arg)
            }
            found |= {kwarg.key for kwarg in call.kwargs if is_content(kwarg.value)}
    return found


def _aliases(root: nodes.Template, name: str) -> set[str]:
    """`name` and the variables that are set to it, or to a part of it."""
    from jinja2 import nodes

    found, queue = {name}, [name]
    while queue:
        known = queue.pop()
        for assignment in root.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _reads(assignment.node, known):
                if target.name not in found:
                    found.add(target.name)
                    queue.append(target.name)
    return found


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name` (or its item `key`), perhaps filtered or sliced."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            found = node.arg.value if isinstance(node.arg, nodes.Const) else None
        else:
            found = node.attr if isinstance(node, nodes.Getattr) else None
        if found != key:
            return False
        node = node.node  # type: ignore[union-attr]
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
