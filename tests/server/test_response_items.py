"""What a model writes as items of responses and as deltas of chats; items made into messages."""

from __future__ import annotations

import pytest

from jaxpage.reasoning_parsers import OutputParser, make_reasoning_parser
from jaxpage.server.chat import Turn
from jaxpage.server.protocol.response_items import read_items, to_messages
from jaxpage.server.response_output import ResponseOutput
from jaxpage.tool_parsers import make
from tests.test_chat_outputs import TOOLS


def test_items_of_one_turn_are_one_message():
    items = read_items(
        [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "e", "logprobs": None}]},
            {"type": "function_call", "id": None, "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "h"}]},
            {"role": "developer", "content": "k"},
            {"role": "assistant", "content": "i"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "j"}]},
        ]
    )  # fmt: skip
    messages = to_messages("z", items)
    calls = messages[2].pop("tool_calls")
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("1", "f"), ("2", "g")]
    assert messages == [
        {"role": "system", "content": "z\n\na\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "reasoning": "d", "content": "e"},
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "h"},
        {"role": "developer", "content": "k"},
        {"role": "assistant", "content": "i"},
        {"role": "assistant", "content": "j"},
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls_are_items(size):
    text = '<think>Two and two.</think>It is 4.<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parser = OutputParser(make_reasoning_parser("qwen3"), make("hermes", TOOLS))
    output, events = ResponseOutput(parser), []
    for begin in range(0, len(text), size):
        piece = text[begin : begin + size]
        events += output.feed(piece, [begin] if size == 1 else [])
    events += output.finish(is_complete=False)
    thought, message, call = output.items()
    kinds = [thought["type"], message["type"], call["type"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert thought["status"] == message["status"] == "completed"
    assert call["status"] == "incomplete"  # it was the last
    (part,) = message["content"]
    assert part["text"] == "It is 4." and (call["name"], call["arguments"]) == ("now", "{}")
    assert output.reasoning == "Two and two."
    if size == 1:  # the end of reasoning is among them, what other items show is not
        assert part["logprobs"] == [*range(text.index("</think>"), text.index("<tool_call>"))]
    (*_, done) = (e for e in events if e["type"] == "response.output_item.done")
    assert done["item"] == call


@pytest.mark.parametrize("pieces", [[("Yes", ["a"]), ("", ["b"])], [("Yes", ["a", "b"])]])
def test_a_message_has_the_logprobs_of_tokens_without_text(pieces):
    """Such as special ones at the end, whether they come alone or with others."""
    output, events = ResponseOutput(OutputParser()), []
    for text, logprobs in pieces:
        events += output.feed(text, logprobs)
    events += output.finish(is_complete=False)
    (part,) = output.items()[0]["content"]
    assert (part["text"], part["logprobs"]) == ("Yes", ["a", "b"])
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == ["a", "b"]


CALLS = (
    'Well. <tool_call>\n{"name": "now", "arguments": {"city": "Bonn"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 3, 20, 45, 1000])
def test_a_chunk_has_one_delta_per_tool_call(size):
    turn = Turn(OutputParser(None, make("hermes", TOOLS)))
    names, arguments, text = {}, {}, ""
    for begin in range(0, len(CALLS), size):
        delta = turn.delta(turn.parser.feed(CALLS[begin : begin + size]))
        text += delta.get("content", "")
        calls = delta.get("tool_calls", [])
        assert len({call["index"] for call in calls}) == len(calls)
        for call in calls:
            index = call["index"]
            if "id" in call:
                assert index not in names and call["type"] == "function"
                names[index] = call["function"]["name"]
            arguments[index] = arguments.get(index, "") + call["function"]["arguments"]
    assert text.strip() == "Well." and names == {0: "now", 1: "weather"}
    assert arguments == dict.fromkeys(names, '{"city": "Bonn"}')
    whole = [call["function"] for call in turn.message()["tool_calls"]]
    assert whole == [{"name": names[i], "arguments": arguments[i]} for i in names]
