"""`jaxpage chat`: a conversation in the terminal; `stream`, which the demo uses too.

Knows turns, commands and what is printed. Must not know how an answer is computed: it renders the
conversation, drives `LLM` step by step, and prints what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from jaxpage.outputs import RequestOutput
from jaxpage.prompts import parse_chat
from jaxpage.sampling_params import SamplingParams
from jaxpage.terminal import long_lines, read_line_shown

if TYPE_CHECKING:
    from jaxpage.llm import LLM

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"
ROOM = 256  # tokens kept free for an answer, if that is no more than a quarter of the longest

Message = dict[str, str]


def stream(
    llm: LLM, token_ids: list[int], params: SamplingParams, write: Callable[[str], None]
) -> RequestOutput:
    """Answer one prompt; `write` gets each piece of the text as it comes.

    Whatever interrupts it, Ctrl-C or an exception of `write`, ends the request and propagates.
    """
    output, written = None, 0
    try:
        llm.add_request("stream", {"prompt_token_ids": token_ids}, params)
        while output is None or not output.finished:
            for output in llm.step():
                text = output.outputs[0].text
                write(text[written:])
                written = len(text)
    except BaseException:
        llm.abort_request("stream")
        raise
    return output


@dataclass
class Conversation:
    """What was said, as a prompt that leaves `room` tokens for the answer."""

    llm: LLM
    system: str | None = None
    room: int = ROOM
    turns: list[Message] = field(default_factory=list)  # user and assistant, in turns

    def ask(self, question: str) -> tuple[list[int], int]:
        """The prompt with this question, and how many of the oldest questions it had to leave out.

        Raises ValueError if the question alone is too long; it is not part of the conversation
        then.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        limit = self.llm.config.max_model_len
        longest = limit - min(self.room, limit // 4)
        num_dropped = 0
        while len(token_ids := self._render(turns)) > longest:
            if len(turns) == 1:
                raise ValueError(
                    f"that makes a prompt of {len(token_ids)} tokens, and {longest} of the "
                    f"{limit} that the model can hold are for prompts; say it in fewer words"
                )
            del turns[:2]
            num_dropped += 1
        self.turns = turns
        return token_ids, num_dropped

    def end_turn(self, answer: str) -> None:
        """Keep the answer; without one, forget the question."""
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def _render(self, turns: list[Message]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        tokenizer, template = self.llm.get_tokenizer(), self.llm.config.chat_template
        (prompt,) = parse_chat([*system, *turns], tokenizer, chat_template=template)
        return prompt.token_ids


def converse(
    llm: LLM,
    console: Console,
    params: SamplingParams,
    *,
    system: str | None = None,
    read: Callable[[], str] | None = None,
) -> Conversation:
    """Read lines (of stdin, or `read`), answer each, until /exit or the end of the input.

    Returns what was said since the last /reset. Raises ValueError for a model that cannot chat.
    """
    _check_can_chat(llm, params)
    room = ROOM if params.max_tokens is None else params.max_tokens
    conversation = Conversation(llm, system, room)
    conversation.ask("?")  # a template that refuses the system prompt does so now
    conversation.end_turn("")
    console.print(HELP, style="dim", highlight=False)
    with long_lines():
        while True:
            try:
                line = (read or read_line_shown)().strip()
                if line == "/exit":
                    return conversation
                _obey(line, conversation, console, params)
            except EOFError:
                return conversation
            except KeyboardInterrupt:  # not while an answer was being written
                console.print(f"\n{HELP}", style="dim", highlight=False)


def _obey(line: str, conversation: Conversation, console: Console, params: SamplingParams) -> None:
    if line == "/reset":
        conversation.turns.clear()
        console.print("the conversation begins anew", style="dim")
    elif line.startswith("/"):
        console.print(f"{line.split()[0]} is not a command: {HELP}", style="dim", markup=False)
    elif line:
        _answer(line, conversation, console, params)


def _check_can_chat(llm: LLM, params: SamplingParams) -> None:
    tokenizer = llm.get_tokenizer()
    if not (llm.config.chat_template or getattr(tokenizer, "chat_template", None)):
        raise ValueError(
            f"{llm.config.model} has no chat template, so it was not made to chat; give one with "
            "--chat-template FILE, or continue a text with jaxpage generate"
        )
    if params.n != 1:
        raise ValueError(f"a conversation has one answer at a time, n={params.n}; leave out --n")


def _answer(
    line: str, conversation: Conversation, console: Console, params: SamplingParams
) -> None:
    try:
        token_ids, num_dropped = conversation.ask(line)
    except ValueError as e:
        console.print(str(e), style="yellow", markup=False)
        return
    if num_dropped:
        console.print(
            f"the conversation outgrew the {conversation.llm.config.max_model_len} tokens that "
            f"the model can hold; the oldest {num_dropped} of its questions are forgotten",
            style="yellow",
        )
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        console.out(piece, end="", highlight=False)

    try:
        output = stream(conversation.llm, token_ids, params, write)
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
    else:
        console.print()
        console.print(describe(output, params.max_tokens), style="dim", highlight=False)
    conversation.end_turn("".join(pieces))


def describe(output: RequestOutput, max_tokens: int | None = None) -> str:
    """Tokens, speed, time to the first token and cache hits of a finished answer, on one line.

    `max_tokens`: its limit, so that an answer which ended there is not said to have run out of room.
    """
    times, (answer,) = output.metrics, output.outputs
    num_tokens = len(answer.token_ids)
    parts = [f"{num_tokens} tokens"]
    seconds = times.last_token_ts - times.first_token_ts
    if seconds > 0:  # those after the first
        parts.append(f"{(num_tokens - 1) / seconds:.0f} tokens/s")
    parts.append(f"first after {1e3 * times.first_token_latency:.0f} ms")
    parts.append(
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    )
    if answer.finish_reason == "length":
        reached = num_tokens == max_tokens
        parts.append(f"cut off: {f'max_tokens={max_tokens}' if reached else 'no room for more'}")
    return ", ".join(parts)
