"""The packaged model that sees: small, right about pictures that it has not seen, and the same in transformers."""

from __future__ import annotations

import io
import random

import jax
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForImageTextToText

from jaxpage import LLM, SamplingParams
from jaxpage.demo.pictures import (
    checkpoint,
    evaluate,
    examples,
    network,
    questions,
    save,
    scenes,
    show,
)
from jaxpage.demo.pictures.scenes import Scene, Thing
from tests.few_programs import few_programs

GREEDY = SamplingParams(temperature=0, max_tokens=56)
SUITES = tuple(questions.ASKING)
SEEN = Scene(
    (Thing(0, "circle", "red", "small"), Thing(4, "star", "orange", "large"), Thing(8, "circle", "blue", "large")),
    (255, 255, 255),
    ((0.0, 0.0),) * 3,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    with few_programs():
        return LLM(str(checkpoint()), **show.OPTIONS, enforce_eager=True)


def test_it_is_small():
    params, _, _ = save.read(checkpoint())
    assert sum(p.size for p in params.values()) <= 3_000_000
    assert sum(path.stat().st_size for path in checkpoint().iterdir() if path.is_file()) < 8_000_000


def test_a_scene_is_drawn_alike_each_time_and_held_out_ones_are_others():
    drawn, again = (np.asarray(scenes.draw(scenes.scene(random.Random(3)))) for _ in range(2))
    np.testing.assert_array_equal(drawn, again)
    assert drawn.shape == (scenes.SIDE, scenes.SIDE, 3)
    rng = random.Random(0)
    for split in ("train", "held_out"):
        found = [scenes.scene(rng, split=split) for _ in range(20)]
        assert {scenes.split_of(one.things) for one in found} == {split}


def test_things_are_where_the_scene_says():
    pixels = np.asarray(scenes.draw(SEEN))
    for thing in SEEN.things:
        row, column = divmod(thing.place, 3)
        middle = pixels[row * 32 + 16, column * 32 + 16]
        assert tuple(middle) == scenes.COLOURS[thing.colour]
    assert tuple(pixels[16, 80]) == SEEN.ground


def test_answers_are_those_of_the_scene():
    rng = random.Random(0)
    said = {kind: set() for kind in SUITES}
    for _ in range(60):
        for kind in SUITES:
            turn = questions.ask(rng, SEEN, kind)
            assert turn is not None
            said[kind].add((turn.question, turn.answer))
    assert {answer for _, answer in said["describe"]} == {
        "A small red circle at the top left, a large orange star in the middle"
        " and a large blue circle at the bottom right."
    }
    assert said["colour"] == {
        ("What colour is the star?", "The star is orange."),
        ("Which colour does the star have?", "The star is orange."),
    }
    assert ("Where is the red circle?", "The red circle is at the top left.") in said["where"]
    assert ("Is the blue circle small or large?", "The blue circle is large.") in said["size"]
    assert ("What is in the middle?", "A large orange star.") in said["at"]
    assert ("How many circles are there?", "There are two circles.") in said["count"]
    assert ("How many orange things are there?", "There is one orange thing.") in said["count"]
    assert ("Is there an orange star?", "Yes.") in said["exists"]
    assert {answer for _, answer in said["exists"]} == {"Yes.", "No."}


def test_a_batch_depends_on_its_step_only():
    _, _, tokenizer = save.read(checkpoint())
    one, two, other = (
        examples.training_batch(tokenizer, rows=2, seed=0, step=step) for step in (5, 5, 6)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not np.array_equal(one.tokens, other.tokens)
    # Only what the model says is a target.
    text = tokenizer.decode(one.targets[one.weights > 0].tolist(), skip_special_tokens=False)
    assert "<|im_end|>" in text and "?" not in text and network.IMAGE not in text


@pytest.mark.slow  # compiles a step and its gradient
def test_training_lowers_the_loss():
    _, config, tokenizer = save.read(checkpoint())
    config = network.model_config(config.vocab_size)
    params = network.start(config, 0)
    batch = examples.training_batch(tokenizer, rows=2, seed=0, step=0)
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(jax.value_and_grad(lambda p: network.loss(p, config, batch)))
        before, gradients = step(params)
        norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
        after, _ = step({k: p - 0.1 / norm * gradients[k] for k, p in params.items()})
    assert all(np.isfinite(g).all() and (g != 0).any() for g in gradients.values())
    assert after < before


@pytest.mark.slow  # 105 questions
def test_questions_about_pictures_that_it_has_not_seen(llm):
    shares = {suite: evaluate.answered(llm, suite, questions=15) for suite in SUITES}
    assert sum(shares.values()) / len(shares) >= 0.85, shares


@pytest.mark.slow
def test_it_talks_without_a_picture(llm):
    (answer,) = llm.chat([{"role": "user", "content": "What is your name?"}], GREEDY)
    assert answer.outputs[0].text == "My name is Pip. I am a very small assistant."


@pytest.mark.slow  # loads transformers' model
def test_transformers_says_the_same(llm):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(), dtype=torch.bfloat16).eval()
    for suite in SUITES:
        for scene, turn in evaluate.asked(suite, 2, seed=1):
            (ours,) = llm.chat(evaluate.messages(scene, turn.question), GREEDY)
            assert ours.outputs[0].token_ids == _generate(model, ours.prompt_token_ids, scene)


@pytest.mark.slow
def test_the_demo_from_its_first_word_to_its_last():
    screen = io.StringIO()
    console = Console(file=screen, width=120, highlight=False)
    with few_programs():  # those of `llm`
        one, many = show.show(console, {"enforce_eager": True})
    printed = screen.getvalue()
    assert "\x1b" not in printed
    assert len(one) >= 5 and len(many) >= 24
    cached = [answer.output.num_cached_tokens for answer in one]
    assert cached[0] == 0 and min(cached[1:]) >= network.NUM_TOKENS
    right = sum(answer.is_right for answer in many)
    assert f"{right} of {len(many)} answers were right" in printed
    assert all(answer.turn.question in printed for answer in one)
    assert "What to type next" in printed and str(checkpoint()) in printed


def _generate(model, prompt: list[int], scene: Scene) -> list[int]:
    picture = examples.patches_of(scene)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=torch.from_numpy(picture.patches).to(torch.bfloat16),
            image_grid_thw=torch.tensor([picture.grid]),
            do_sample=False,
            max_new_tokens=GREEDY.max_tokens,
        )
    return out[0, len(prompt) :].tolist()
