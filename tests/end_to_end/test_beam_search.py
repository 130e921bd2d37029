"""Beam search against transformers' `generate(num_beams=k)`, float32 and seeded."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers

from jaxpage import BeamSearchParams
from tests import checkpoints
from tests.end_to_end.test_parity import prompts_of

PROMPT_LENS = (1, 7, 31, 64)
NUM_TOKENS = 20
SEARCHES = [
    {"length_penalty": 1.0, "early_stopping": False},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": 0.5, "early_stopping": True},
    {"length_penalty": -1.0, "early_stopping": False},
]


def torch_beams(path, prompts, *, width, eos=None, max_tokens=NUM_TOKENS, **options):
    """Per prompt: (tokens with the prompt, score) of each hypothesis, best first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = eos  # `generate` takes None for "as configured"
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        tokens = [cut(row, len(prompt), eos) for row in out.sequences.tolist()]
        answers.append(list(zip(tokens, out.sequences_scores.tolist(), strict=True)))
    return answers


def cut(tokens, prompt_len, eos):
    """Without the padding after EOS."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    end = next((i for i, t in enumerate(tokens) if i >= prompt_len and t in ends), len(tokens))
    return tokens[: end + 1]


def usual_tokens(path, prompts, count):
    """Ids that beams like, so that as EOS they end some, early and late."""
    found = Counter()
    for prompt, beams in zip(prompts, torch_beams(path, prompts, width=4), strict=True):
        found.update(t for tokens, _ in beams for t in tokens[len(prompt) + 2 :])
    return [token for token, _ in found.most_common(count)]


def build_llm(path, **options):
    return checkpoints.make_llm(path, max_num_seqs=16, enforce_eager=True, **options)


def assert_beams_equal(outputs, prompts, expected, length_penalty):
    for prompt, output, beams in zip(prompts, outputs, expected, strict=True):
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in beams]
        for sequence, (_, score) in zip(output.sequences, beams, strict=True):
            num_tokens = len(sequence.tokens) - len(prompt)
            # Of log-probabilities, not of scores: a negative penalty makes hundreds of them.
            assert abs(sequence.cum_logprob - score * num_tokens**length_penalty) < 1e-4
            assert len(sequence.logprobs) == num_tokens
            answer = sequence.tokens[len(prompt) :]
            chosen = [row[t].logprob for row, t in zip(sequence.logprobs, answer, strict=True)]
            assert abs(sum(chosen) - sequence.cum_logprob) < 1e-9


def build_with_usual_eos(path, family, variant, prompts, num_eos=1):
    """The same weights with EOS ids that beams like."""
    checkpoints.build(family, variant, path)
    eos = usual_tokens(path, prompts, num_eos)
    checkpoints.build(family, variant, path, eos_token_id=eos)
    return eos


@pytest.mark.slow
def test_beams_equal_transformers(tmp_path):
    prompts = prompts_of((7, 31))
    eos = build_with_usual_eos(tmp_path, "qwen2", 0, prompts)
    # Of a greedy row, what was processed is what was raw.
    llm = build_llm(tmp_path, logprobs_mode="processed")
    reasons = Counter()
    for width, search in zip((2, 4, 8), SEARCHES[:3], strict=True):
        before = llm.stats()
        outputs = llm.beam_search(prompts, BeamSearchParams(width, 10, **search))
        expected = torch_beams(tmp_path, prompts, width=width, eos=eos, max_tokens=10, **search)
        assert_beams_equal(outputs, prompts, expected, search["length_penalty"])
        reasons.update(s.finish_reason for o in outputs for s in o.sequences)
        after = llm.stats()
        # A step goes on with `width` beams of each prompt, and the last to write to a block keeps it.
        num_steps = after.num_steps - before.num_steps
        num_copies = after.num_block_copies - before.num_block_copies
        assert 0 < num_copies <= num_steps * len(prompts) * (width - 1)
    assert set(reasons) == {"stop", "length"}
    assert llm.stats().kv_cache_usage == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant", "num_eos"),
    [
        pytest.param("llama", 0, 3, marks=pytest.mark.deep),
        pytest.param("qwen3", 2, 1, marks=pytest.mark.deep),
        ("gemma3", 0, 2),  # whose layers see unequally far
    ],
)
def test_beams_equal_transformers_in_depth(family, variant, num_eos, tmp_path):
    prompts = prompts_of((1, 7, 64))
    eos = build_with_usual_eos(tmp_path, family, variant, prompts, num_eos)
    llm = build_llm(tmp_path, max_logprobs=64)
    reasons = Counter()
    for width, search in zip((8, 2, 4, 8, 4), SEARCHES, strict=True):
        outputs = llm.beam_search(prompts, BeamSearchParams(width, NUM_TOKENS, **search))
        expected = torch_beams(tmp_path, prompts, width=width, eos=eos, **search)
        assert_beams_equal(outputs, prompts, expected, search["length_penalty"])
        reasons.update(s.finish_reason for o in outputs for s in o.sequences)
    assert set(reasons) == {"stop", "length"}
