"""The three acts of `jaxpage demo`: one long table, many questions at once, many stories from one prompt.

Each act asks the engine what `text` makes up, shows it on a console, and returns its figures. Knows
what is shown; must not know how the engine was made, nor how it works: it drives `LLM`, and reads
its stats.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxpage.chat import describe, stream
from jaxpage.demo import text
from jaxpage.outputs import RequestOutput
from jaxpage.prompts import parse_chat
from jaxpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpage.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=96)
LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question put to the model, with the answer that the table gives."""

    turn: text.Turn
    output: RequestOutput

    @property
    def is_right(self) -> bool:
        return self.output.outputs[0].text.strip() == self.turn.answer

    @property
    def first_token_ms(self) -> float:
        return 1e3 * self.output.metrics.first_token_latency


@dataclass(frozen=True, kw_only=True)
class TableFigures:
    """Of questions about one table, one after the other."""

    answers: list[Answer]

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def first_ms(self) -> float:
        """To the first token of the first answer, which pays for the table."""
        return self.answers[0].first_token_ms

    @property
    def others_ms(self) -> float:
        """Median time to the first token of the other answers."""
        return statistics.median(answer.first_token_ms for answer in self.answers[1:])

    @property
    def speedup(self) -> float:
        return self.first_ms / self.others_ms


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The engine after one step."""

    num_running: int
    num_waiting: int
    num_blocks: int  # that sequences hold
    num_tokens: int  # generated since the first moment
    seconds: float  # likewise


@dataclass(frozen=True, kw_only=True)
class BatchFigures:
    """Of many questions at once."""

    answers: list[Answer]
    moments: list[Moment]
    hit_rate: float  # share of the prompts' tokens that were found in the prefix cache

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.moments[-1].num_tokens / self.moments[-1].seconds

    @property
    def peak_blocks(self) -> int:
        return max(moment.num_blocks for moment in self.moments)


@dataclass(frozen=True, kw_only=True)
class StoryFigures:
    """Of n continuations of one prompt, at the moment when they had most to share."""

    stories: list[str]
    num_blocks: int  # that the sequences hold
    num_blocks_unshared: int  # what they would hold if each had its own


def rehearse(llm: LLM) -> None:
    """Two questions, unseen: a first launch of a program costs more than the later ones."""
    rng = random.Random("rehearsal")
    people = text.people(rng, 24)
    system = text.system_message(text.table(people))
    for person in people[:2]:
        stream(llm, _render(llm, system, text.look_up(rng, [person])), GREEDY, lambda piece: None)
    llm.reset_prefix_cache()


def ask_one_by_one(
    llm: LLM, console: Console, rng: random.Random, *, num_rows: int, num_questions: int
) -> TableFigures:
    """Act 1: questions about one long table; all but the first find it in the prefix cache."""
    people = text.people(rng, num_rows, split="held_out")
    system = text.system_message(text.table(people))
    lines = system.splitlines()
    shown = [*lines[:6], f"... {num_rows - 3} more rows ...", lines[-1]]
    console.print("\n".join(shown), style="cyan", markup=False, highlight=False)
    answers = []
    for index, person in enumerate(rng.sample(people, num_questions)):
        turn = text.look_up(rng, [person], text.COLUMNS[index % len(text.COLUMNS)])
        token_ids = _render(llm, system, turn)
        console.print(f"\n> {turn.question}", style="bold", markup=False, highlight=False)
        output = stream(
            llm, token_ids, GREEDY, lambda piece: console.out(piece, end="", highlight=False)
        )
        answers.append(Answer(turn=turn, output=output))
        console.print(_verdict(answers[-1]), highlight=False)
        console.print(describe(output), style="dim", highlight=False)
    figures = TableFigures(answers=answers)
    console.print(
        f"\nTo its first token, the first question took [bold]{figures.first_ms:.1f} ms[/]: it paid "
        f"for the table.\nThe others, the table in the prefix cache, took "
        f"[bold]{figures.others_ms:.1f} ms[/] (median): [bold]{figures.speedup:.1f} times[/] as fast."
        f"\n{figures.num_right} of {num_questions} answers were right.",
        highlight=False,
    )
    return figures


def ask_at_once(
    llm: LLM, console: Console, rng: random.Random, *, num_questions: int
) -> BatchFigures:
    """Act 2: questions about four tables in one continuous batch, drawn step by step."""
    tables = [text.people(rng, 8, split="held_out") for _ in range(4)]
    turns, prompts = [], []
    for index in range(num_questions):
        people = tables[index % len(tables)]
        ask = text.json_record if index % 3 == 0 else text.look_up
        turns.append(ask(rng, people))
        prompts.append(_render(llm, text.system_message(text.table(people)), turns[-1]))
    before, start = llm.stats(), time.perf_counter()
    for index, token_ids in enumerate(prompts):
        llm.add_request(str(index), {"prompt_token_ids": token_ids}, GREEDY)
    outputs: dict[str, RequestOutput] = {}
    moments: list[Moment] = []
    with Live(console=console, auto_refresh=False) as live:
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
            now = llm.stats()
            moments.append(
                Moment(
                    num_running=now.num_running,
                    num_waiting=now.num_waiting,
                    num_blocks=now.num_blocks_used,
                    num_tokens=now.generation_tokens - before.generation_tokens,
                    seconds=time.perf_counter() - start,
                )
            )
            live.update(draw(moments, now.num_blocks), refresh=console.is_terminal)
    end_live(console)
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    figures = BatchFigures(
        answers=[Answer(turn=t, output=outputs[str(i)]) for i, t in enumerate(turns)],
        moments=moments,
        hit_rate=hits / (now.prefix_cache_queries - before.prefix_cache_queries),
    )
    for answer in [answer for answer in figures.answers if not answer.is_right][:3]:
        console.print(f"> {answer.turn.question}", style="dim", markup=False, highlight=False)
        console.out(answer.output.outputs[0].text, end="", highlight=False)
        console.print(_verdict(answer), highlight=False)
    console.print(
        f"\n[bold]{figures.tokens_per_second:.0f} tokens/s[/], at most {figures.peak_blocks} of "
        f"{now.num_blocks} blocks in use; {figures.num_right} of {num_questions} answers were "
        f"right.\n{figures.hit_rate:.0%} of the prompts' tokens came from the prefix cache: four "
        "tables, each computed once.",
        highlight=False,
    )
    return figures


def tell_stories(
    llm: LLM, console: Console, rng: random.Random, *, num_stories: int
) -> StoryFigures:
    """Act 3: samples of one story, told after a table so that there is something to share."""
    turn = text.story(rng)
    system = text.system_message(text.table(text.people(rng, 24)))
    token_ids = _render(llm, system, turn)
    params = SamplingParams(n=num_stories, temperature=1.0, seed=7, max_tokens=128)
    llm.add_request("stories", {"prompt_token_ids": token_ids}, params)
    outputs: list[RequestOutput] = []
    num_blocks = num_unshared = 0
    while llm.has_unfinished_requests():
        outputs = llm.step() or outputs
        now = llm.stats()
        if now.num_block_references > num_unshared:
            num_blocks, num_unshared = now.num_blocks_used, now.num_block_references
    (output,) = outputs
    console.print(f"> {turn.question}", style="bold", markup=False, highlight=False)
    for number, completion in enumerate(output.outputs, start=1):
        story = Text(f"{number}. {completion.text}", style="cyan")
        console.print(story, highlight=False)
    console.print(
        f"\nThe prompt of {len(token_ids)} tokens was computed once. The {num_stories} stories "
        f"together held\n[bold]{num_blocks} blocks[/]; with a copy of the prompt each, they would "
        f"have held {num_unshared}.",
        highlight=False,
    )
    return StoryFigures(
        stories=[completion.text for completion in output.outputs],
        num_blocks=num_blocks,
        num_blocks_unshared=num_unshared,
    )


def end_live(console: Console) -> None:
    """In a pipe, rich leaves the last frame of a `Live` without the end of its line."""
    if not console.is_terminal:
        console.print()


def draw(moments: Sequence[Moment], num_usable: int) -> Group:
    """The latest moment as numbers and a bar, and the blocks in use over time."""
    now = moments[-1]
    peak = max(moment.num_blocks for moment in moments)
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        f"[green]{now.num_running} running[/]",
        f"[yellow]{now.num_waiting} waiting[/]",
        f"{now.num_tokens} tokens",
        f"[bold]{now.num_tokens / now.seconds:.0f} tokens/s[/]",
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        "KV blocks",
        ProgressBar(total=num_usable, completed=now.num_blocks, width=40),
        f"{now.num_blocks} of {num_usable}",
    )
    return Group(rows, bar, f"over time {sparkline([m.num_blocks for m in moments])} peak {peak}")


def sparkline(values: Sequence[int], width: int = 60) -> str:
    """The values as columns of text, the highest one full; of many values the largest of each part."""
    part = math.ceil(len(values) / width)
    columns = [max(values[i : i + part]) for i in range(0, len(values), part)]
    top = max(max(columns), 1)
    return "".join(LEVELS[math.ceil(value / top * (len(LEVELS) - 1))] for value in columns)


def _render(llm: LLM, system: str, turn: text.Turn) -> list[int]:
    (prompt,) = parse_chat(text.messages(system, [turn]), llm.get_tokenizer())
    return prompt.token_ids


def _verdict(answer: Answer) -> str:
    if answer.is_right:
        return " [green]✓[/]"
    return f" [red]✗[/] the right answer: {escape(answer.turn.answer)}"
