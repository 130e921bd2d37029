"""The demo from its first word to its last, once.

Programs have two step sizes and are compiled at their first use here, so that only those in use are.
"""

from __future__ import annotations

import io
import random
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from jaxpage.demo import checkpoint, scenarios
from jaxpage.demo.show import Shown, manifest, num_parameters, show
from jaxpage.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxpage.runner.programs import ProgramRecord
from tests.few_programs import few_programs


@pytest.fixture(scope="module")
def shown() -> tuple[Shown, str]:
    """What the scenarios saw, and what a reader of a pipe sees."""
    screen = io.StringIO()
    console = Console(file=screen, width=120, highlight=False)
    with few_programs():
        seen = show(console, {"enforce_eager": True, "max_num_batched_tokens": 32})
    return seen, screen.getvalue()


@pytest.mark.slow
def test_the_first_question_pays_for_the_table(shown):
    first, *others = [answer.output for answer in shown[0].table]
    assert first.num_cached_tokens == 0
    for output in others:
        # All but what follows the table, and the rest of a block.
        assert output.num_cached_tokens > 0.8 * len(first.prompt_token_ids)
    assert min(answer.first_token_ms for answer in shown[0].table) > 0
    assert f"the first question took {shown[0].table[0].first_token_ms:.1f} ms" in shown[1]


@pytest.mark.slow
def test_answers_are_compared_with_the_table(shown):
    for answer in [*shown[0].table, *shown[0].batch]:
        assert answer.is_right == (answer.output.outputs[0].text.strip() == answer.turn.answer)
    assert shown[1].count("✓") == sum(answer.is_right for answer in shown[0].table)
    num_right = sum(answer.is_right for answer in shown[0].batch)
    assert f"{num_right} of 32 answers were right" in shown[1]


def test_an_answer_as_long_as_allowed_did_not_run_out_of_room(monkeypatch):
    """The demo's limit is `max_tokens`, not the model's length."""
    limit = scenarios.GREEDY.max_tokens
    answer = CompletionOutput(
        index=0,
        text="?",
        token_ids=[5] * limit,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length",
    )
    output = RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[answer],
        finished=True,
        num_cached_tokens=0,
        metrics=RequestStateStats(),
    )
    monkeypatch.setattr(scenarios, "stream", lambda *args: output)
    monkeypatch.setattr(scenarios, "_render", lambda *args: [1])
    monkeypatch.setattr(scenarios.Answer, "first_token_ms", 1.0)
    screen = io.StringIO()
    scenarios.ask_one_by_one(
        MagicMock(), Console(file=screen, width=200), random.Random(0), num_rows=8, num_questions=2
    )
    assert screen.getvalue().count(f"cut off: max_tokens={limit}") == 2


@pytest.mark.slow
def test_questions_wait_and_run_in_one_batch(shown):
    batch, (before, *history) = shown[0].batch, shown[0].batch_stats
    assert len(batch) == 32 and all(answer.output.finished for answer in batch)
    assert 1 < max(stats.num_running for stats in history) <= 8
    assert max(stats.num_waiting for stats in history) >= 24
    assert history[-1].num_running == history[-1].num_waiting == 0
    num_tokens = sum(len(answer.output.outputs[0].token_ids) for answer in batch)
    assert history[-1].generation_tokens - before.generation_tokens == num_tokens
    hits = history[-1].prefix_cache_hits - before.prefix_cache_hits
    hit_rate = hits / (history[-1].prefix_cache_queries - before.prefix_cache_queries)
    assert 0.5 < hit_rate < 1  # 28 of the 32 find their table
    assert f"{hit_rate:.0%} of the prompts' tokens came from the prefix cache" in shown[1]
    peak = max(stats.num_blocks_used for stats in history)
    assert peak > 0 and f"at most {peak} of {before.num_blocks} blocks" in shown[1]


@pytest.mark.slow
def test_stories_share_the_blocks_of_their_prompt(shown):
    stories, stats = shown[0].stories, shown[0].story_stats
    assert len(stories) == 8 and len(set(stories)) > 1
    assert 0 < 2 * stats.num_blocks_used < stats.num_block_references


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
    programs = [ProgramRecord(name="admit"), ProgramRecord(name="decode R=2")]
    Console(file=screen, width=80).print(manifest(programs))
    assert "0 of 2 ready" in screen.getvalue()
    assert screen.getvalue().count("compiling or waiting") == 2


def test_a_sparkline_keeps_the_peaks():
    assert scenarios.sparkline([0, 4, 8]) == " ▄█"
    assert scenarios.sparkline([0, 0]) == "  "
    many = scenarios.sparkline([1] * 500 + [9] + [1] * 500)
    assert len(many) <= 60 and many.count("█") == 1
