"""Outputs as notebooks show them."""

from __future__ import annotations

import pytest

from jaxpage.flat_logprobs import FlatLogprobs
from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats

ROWS = [
    {7: Logprob(-0.5, 1, " <b>"), 9: Logprob(-1.0, 2, "x")},
    {8: Logprob(-float("inf"), 40, "&")},
]


def output_of(logprobs, text=" <b>&"):
    completion = CompletionOutput(
        index=1,
        text=text,
        token_ids=[7, 8],
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="stop",
    )
    return RequestOutput(
        request_id="0",
        prompt="<script>",
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        metrics=RequestStateStats(),
    )


def flat(rows):
    found = FlatLogprobs()
    for row in rows:
        found.append(row)
    return found


@pytest.mark.parametrize("logprobs", [ROWS, flat(ROWS)], ids=["dicts", "flat"])
def test_a_row_for_each_token(logprobs):
    table = output_of(logprobs).df()
    assert list(table.columns) == ["index", "position", "token_id", "token", "logprob", "rank"]
    assert table.values.tolist() == [[1, 0, 7, " <b>", -0.5, 1], [1, 1, 8, "&", -float("inf"), 40]]


@pytest.mark.parametrize("logprobs", [ROWS, flat(ROWS)], ids=["dicts", "flat"])
def test_tokens_are_coloured_and_never_html(logprobs):
    html = output_of(logprobs)._repr_html_()
    assert "&lt;script&gt;" in html and "<script>" not in html and "<b>" not in html
    assert '0.31)" title="7: logprob -0.500, rank 1"> &lt;b&gt;</span>' in html
    assert '0.80)" title="8: logprob -inf, rank 40">&amp;</span>' in html
    assert html.endswith("<small>stop</small></div>")


def test_without_logprobs_there_is_the_text():
    output = output_of(None)
    assert " &lt;b&gt;&amp; <small>" in output._repr_html_()
    assert output.df()["token"].isna().all() and output.df()["token_id"].tolist() == [7, 8]
    without_tokenizer = [{7: Logprob(-0.5)}, {8: Logprob(-0.5)}]
    assert "logprob" not in output_of(without_tokenizer)._repr_html_()
