"""The scenarios of `jaxpage demo`: questions about one table, many at once, many stories from one prompt.

Each scenario shows its progress on a console and returns its results. It drives `LLM` and reads its stats.
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
    from jaxpage.engine.stats import EngineStats
    from jaxpage.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=96)
LEVELS = " ▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60  # columns


@dataclass(frozen=True)
class Answer:
    """One question to the model, with the answer from the table."""

    turn: text.Turn
    output: RequestOutput

    @property
    def is_right(self) -> bool:
        return self.output.outputs[0].text.strip() == self.turn.answer

    @property
    def first_token_ms(self) -> float:
        return 1e3 * self.output.metrics.first_token_latency

    @property
    def verdict(self) -> str:
        right = f" [red]✗[/] the right answer: {escape(self.turn.answer)}"
        return " [green]✓[/]" if self.is_right else right


def rehearse(llm: LLM) -> None:
    """Two questions, not shown: the first launch of a program is slower than later ones."""
    rng = random.Random("rehearsal")
    people = text.people(rng, 24)
    system = text.system_message(text.table(people))
    for person in people[:2]:
        stream(llm, _render(llm, system, text.look_up(rng, [person])), GREEDY, lambda piece: None)
    llm.reset_prefix_cache()


def ask_one_by_one(
    llm: LLM, console: Console, rng: random.Random, *, num_rows: int, num_questions: int
) -> list[Answer]:
    """Questions about one long table; all but the first find the table in the prefix cache."""
    people = text.people(rng, num_rows, split="held_out")
    system = text.system_message(text.table(people))
    lines = system.splitlines()
    shown = [*lines[:6], f"... {num_rows - 3} more rows ...", lines[-1]]
    console.print("\n".join(shown), style="cyan", markup=False)
    answers = []
    for index, person in enumerate(rng.sample(people, num_questions)):
        turn = text.look_up(rng, [person], text.COLUMNS[index % len(text.COLUMNS)])
        console.print(f"\n> {turn.question}", style="bold", markup=False)
        prompt = _render(llm, system, turn)
        output = stream(llm, prompt, GREEDY, lambda piece: console.out(piece, end=""))
        answers.append(Answer(turn, output))
        console.print(answers[-1].verdict)
        console.print(describe(output, GREEDY.max_tokens), style="dim")
    first, *others = (answer.first_token_ms for answer in answers)
    median = statistics.median(others)
    console.print(
        f"\nTo its first token, the first question took [bold]{first:.1f} ms[/]: it paid for the "
        f"table.\nThe others, the table in the prefix cache, took [bold]{median:.1f} ms[/] "
        f"(median): [bold]{first / median:.1f} times[/] as fast.\n"
        f"{sum(answer.is_right for answer in answers)} of {num_questions} answers were right.",
    )
    return answers


def ask_at_once(
    llm: LLM, console: Console, rng: random.Random, *, num_questions: int
) -> tuple[list[Answer], list[EngineStats]]:
    """Questions about four tables in one continuous batch, drawn step by step. Stats: before, and after each step."""
    tables = [text.people(rng, 8, split="held_out") for _ in range(4)]
    turns, prompts = [], []
    for index in range(num_questions):
        people = tables[index % len(tables)]
        ask = text.json_record if index % 3 == 0 else text.look_up
        turns.append(ask(rng, people))
        prompts.append(_render(llm, text.system_message(text.table(people)), turns[-1]))
    history, start = [llm.stats()], time.perf_counter()
    for index, token_ids in enumerate(prompts):
        llm.add_request(str(index), {"prompt_token_ids": token_ids}, GREEDY)
    outputs: dict[str, RequestOutput] = {}
    with Live(console=console, auto_refresh=False) as live:
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
            history.append(llm.stats())
            seconds = time.perf_counter() - start
            live.update(draw(history, seconds), refresh=console.is_terminal)
    end_live(console)
    answers = [Answer(turn, outputs[str(index)]) for index, turn in enumerate(turns)]
    for answer in [answer for answer in answers if not answer.is_right][:3]:
        console.print(f"> {answer.turn.question}", style="dim", markup=False)
        console.out(answer.output.outputs[0].text, end="")
        console.print(answer.verdict)
    before, after = history[0], history[-1]
    rate = (after.generation_tokens - before.generation_tokens) / seconds
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    hit_rate = hits / (after.prefix_cache_queries - before.prefix_cache_queries)
    console.print(
        f"\n[bold]{rate:.0f} tokens/s[/], at most {max(x.num_blocks_used for x in history)} of "
        f"{after.num_blocks} blocks in use; {sum(answer.is_right for answer in answers)} of "
        f"{num_questions} answers were right.\n{hit_rate:.0%} of the prompts' tokens came from the "
        "prefix cache: four tables, each computed once.",
    )
    return answers, history


def tell_stories(
    llm: LLM, console: Console, rng: random.Random, *, num_stories: int
) -> tuple[list[str], EngineStats]:
    """Samples of one story, after a table so that there is a prefix to share; the stats when most was shared."""
    turn = text.story(rng)
    system = text.system_message(text.table(text.people(rng, 24)))
    token_ids = _render(llm, system, turn)
    params = SamplingParams(n=num_stories, temperature=1.0, seed=7, max_tokens=128)
    llm.add_request("stories", {"prompt_token_ids": token_ids}, params)
    outputs: list[RequestOutput] = []
    history = [llm.stats()]
    while llm.has_unfinished_requests():
        outputs = llm.step() or outputs
        history.append(llm.stats())
    most = max(history, key=lambda stats: stats.num_block_references)
    stories = [completion.text for completion in outputs[0].outputs]
    console.print(f"> {turn.question}", style="bold", markup=False)
    for number, story in enumerate(stories, start=1):
        console.print(Text(f"{number}. {story}", style="cyan"))
    console.print(
        f"\nThe prompt of {len(token_ids)} tokens was computed once. The {num_stories} stories "
        f"together held\n[bold]{most.num_blocks_used} blocks[/]; with a copy of the prompt each, "
        f"they would have held {most.num_block_references}.",
    )
    return stories, most


def end_live(console: Console) -> None:
    """In a pipe, rich leaves the last frame of a `Live` without a line break."""
    if not console.is_terminal:
        console.print()


def draw(history: Sequence[EngineStats], seconds: float) -> Group:
    """The latest stats as numbers and a bar, and the used blocks over time."""
    now, blocks = history[-1], [stats.num_blocks_used for stats in history[1:]]
    num_tokens = now.generation_tokens - history[0].generation_tokens
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        f"[green]{now.num_running} running[/]",
        f"[yellow]{now.num_waiting} waiting[/]",
        f"{num_tokens} tokens",
        f"[bold]{num_tokens / seconds:.0f} tokens/s[/]",
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        "KV blocks",
        ProgressBar(total=now.num_blocks, completed=now.num_blocks_used, width=40),
        f"{now.num_blocks_used} of {now.num_blocks}",
    )
    return Group(rows, bar, f"over time {sparkline(blocks)} peak {max(blocks)}")


def sparkline(values: Sequence[int]) -> str:
    """The values as text columns, the highest one full. If there are too many, each column is a maximum."""
    part = math.ceil(len(values) / SPARKLINE_WIDTH)
    columns = [max(values[i : i + part]) for i in range(0, len(values), part)]
    top = max(*columns, 1)
    return "".join(LEVELS[math.ceil(value / top * (len(LEVELS) - 1))] for value in columns)


def _render(llm: LLM, system: str, turn: text.Turn) -> list[int]:
    (prompt,) = parse_chat(text.messages(system, [turn]), llm.get_tokenizer())
    return prompt.token_ids
