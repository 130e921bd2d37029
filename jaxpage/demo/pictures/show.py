"""`jaxpage demo --pictures`: a picture drawn on the terminal, questions about it, then many pictures at once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from jaxpage.demo.pictures import checkpoint
from jaxpage.demo.pictures.questions import ASKING, Turn, ask
from jaxpage.demo.pictures.scenes import Scene, draw, scene

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxpage.llm import LLM
    from jaxpage.outputs import RequestOutput

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "kv_cache_memory_bytes": "6M",
    "block_size": 8,
}
_COLUMNS = 32  # of the terminal; one line shows two rows of pixels
NEXT = """\
jaxpage serve {folder}   this model behind OpenAI's API, with a page to chat at

Or in Python:

from jaxpage import LLM
from jaxpage.demo.pictures import checkpoint
from PIL import Image

llm = LLM(str(checkpoint()))
picture = {{"type": "image_pil", "image_pil": Image.open("FILE")}}
question = {{"type": "text", "text": "What do you see?"}}
print(llm.chat([{{"role": "user", "content": [picture, question]}}])[0].outputs[0].text)"""


@dataclass(frozen=True)
class Answer:
    """One question about a picture, with the correct answer."""

    turn: Turn
    output: RequestOutput

    @property
    def is_right(self) -> bool:
        return self.output.outputs[0].text == self.turn.answer


def show(
    console: Console | None = None, options: Mapping[str, Any] | None = None
) -> tuple[list[Answer], list[Answer]]:
    """Run the demo; returns the answers about one picture, and about many. `options`: as for `LLM`."""
    console = console or Console(highlight=False)
    options = {"model": str(checkpoint())} | OPTIONS | dict(options or {})
    console.rule("jaxpage demo, with pictures")
    with console.status("loading a model of 2.5 million parameters, and compiling its programs"):
        from jaxpage.llm import LLM

        llm = LLM(**options)
    rng = random.Random(5)
    one = ask_about_one(llm, console, rng)
    many = ask_about_many(llm, console, rng, num_pictures=8, num_questions=4)
    console.rule("[bold]What to type next[/]", align="left")
    console.print(NEXT.format(folder=options["model"]), markup=False)
    return one, many


def ask_about_one(llm: LLM, console: Console, rng: random.Random) -> list[Answer]:
    """A question of each kind about one picture: it is encoded once, and then found in the prefix cache."""
    seen = scene(rng, 4, split="held_out")
    if console.color_system is not None:
        console.print(on_terminal(draw(seen)))
    answers = []
    for turn in _questions(rng, seen, kinds=tuple(ASKING)):
        (output,) = llm.chat(_messages(seen, turn), _greedy(), use_tqdm=False)
        answers.append(Answer(turn, output))
        console.print(f"\n> {turn.question}", style="bold", markup=False)
        console.print(Text(output.outputs[0].text), _verdict(answers[-1]))
        cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens"
        console.print(f"{cached} of the prompt were in the prefix cache", style="dim")
    return answers


def ask_about_many(
    llm: LLM, console: Console, rng: random.Random, *, num_pictures: int, num_questions: int
) -> list[Answer]:
    """Questions about many pictures in one continuous batch."""
    console.print()
    total = num_pictures * num_questions
    console.rule(f"[bold]{total} questions about {num_pictures} pictures at once[/]", align="left")
    asked = []
    for _ in range(num_pictures):
        seen = scene(rng, split="held_out")
        kinds = rng.sample(tuple(ASKING), num_questions)
        asked += [(seen, turn) for turn in _questions(rng, seen, kinds=kinds)]
    conversations = [_messages(seen, turn) for seen, turn in asked]
    outputs = llm.chat(conversations, _greedy(), use_tqdm=False)
    answers = [Answer(turn, output) for (_, turn), output in zip(asked, outputs, strict=True)]
    for answer in answers[:6]:
        said = answer.output.outputs[0].text
        console.print(f"> {escape(answer.turn.question)} {escape(said)}", _verdict(answer))
    right = sum(answer.is_right for answer in answers)
    console.print(f"{right} of {len(answers)} answers were right\n")
    return answers


def on_terminal(picture: Image) -> Text:
    """The picture as half blocks; each character shows two pixels, one above the other."""
    from PIL import Image

    small = picture.resize((_COLUMNS, _COLUMNS), Image.Resampling.BOX)
    pixels: Any = small.load()
    text = Text()
    for row in range(0, _COLUMNS, 2):
        for column in range(_COLUMNS):
            upper, lower = (pixels[column, row + i] for i in (0, 1))
            style = f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})"
            text.append("▀", style)
        text.append("\n")
    return text


def _questions(rng: random.Random, seen: Scene, *, kinds: Any) -> list[Turn]:
    return [turn for kind in kinds if (turn := ask(rng, seen, kind)) is not None]


def _messages(seen: Scene, turn: Turn) -> list[dict[str, Any]]:
    picture = {"type": "image_pil", "image_pil": draw(seen)}
    return [{"role": "user", "content": [picture, {"type": "text", "text": turn.question}]}]


def _greedy() -> Any:
    from jaxpage.sampling_params import SamplingParams

    return SamplingParams(temperature=0, max_tokens=64)


def _verdict(answer: Answer) -> str:
    if answer.is_right:
        return "[green]✓[/]"
    return f"[red]✗[/] the right answer: {escape(answer.turn.answer)}"
