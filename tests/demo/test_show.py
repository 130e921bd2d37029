"""The demo from its first word to its last, once, and its figures.

Programs are compiled at their first use here, so that only those in use are.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jaxpage.demo import acts, checkpoint
from jaxpage.demo.show import Figures, manifest, num_parameters, show


@pytest.fixture(scope="module")
def shown() -> tuple[Figures, str]:
    """The figures, and what a reader of a pipe sees."""
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    figures = show(console, {"enforce_eager": True, "max_num_batched_tokens": 32})
    return figures, screen.getvalue()


@pytest.mark.slow
def test_the_first_question_pays_for_the_table(shown):
    first, *others = [answer.output for answer in shown[0].table.answers]
    assert first.num_cached_tokens == 0
    for output in others:
        # All but what follows the table, and the rest of a block.
        assert output.num_cached_tokens > 0.8 * len(first.prompt_token_ids)
    assert shown[0].table.first_ms > 0 and shown[0].table.others_ms > 0


@pytest.mark.slow
def test_answers_are_compared_with_the_table(shown):
    answers = [*shown[0].table.answers, *shown[0].batch.answers]
    for answer in answers:
        assert answer.is_right == (answer.output.outputs[0].text.strip() == answer.turn.answer)
    assert shown[1].count("✓") == shown[0].table.num_right
    assert f"{shown[0].batch.num_right} of 32 answers were right" in shown[1]


@pytest.mark.slow
def test_questions_wait_and_run_in_one_batch(shown):
    batch = shown[0].batch
    assert len(batch.answers) == 32 and all(answer.output.finished for answer in batch.answers)
    assert 1 < max(moment.num_running for moment in batch.moments) <= 8
    assert max(moment.num_waiting for moment in batch.moments) >= 24
    assert batch.moments[-1].num_running == batch.moments[-1].num_waiting == 0
    assert batch.moments[-1].num_tokens == sum(
        len(answer.output.outputs[0].token_ids) for answer in batch.answers
    )
    assert 0.5 < batch.hit_rate < 1  # 28 of the 32 find their table
    assert batch.peak_blocks > 0 and batch.tokens_per_second > 0


@pytest.mark.slow
def test_stories_share_the_blocks_of_their_prompt(shown):
    stories = shown[0].stories
    assert len(stories.stories) == 8 and len(set(stories.stories)) > 1
    assert 0 < 2 * stories.num_blocks < stories.num_blocks_unshared


@pytest.mark.slow
def test_the_piped_demo_is_plain_text(shown):
    printed = shown[1]
    assert "\x1b" not in printed
    for title in ("What runs", "What was compiled", "1. ", "2. ", "3. ", "What to type next"):
        assert f"{title}" in printed
    assert f"{num_parameters(str(checkpoint())):,} in bfloat16" in printed
    assert printed.count("prompt tokens cached") == 6


def test_the_manifest_says_what_is_not_compiled_yet():
    screen = io.StringIO()
    Console(file=screen, width=80).print(manifest(["admit", "decode R=2"], {}))
    assert "0 of 2 ready" in screen.getvalue()
    assert screen.getvalue().count("compiling or waiting") == 2


def test_a_sparkline_keeps_the_peaks():
    assert acts.sparkline([0, 4, 8]) == " ▄█"
    assert acts.sparkline([0, 0]) == "  "
    many = acts.sparkline([1] * 500 + [9] + [1] * 500)
    assert len(many) <= 60 and many.count("█") == 1
