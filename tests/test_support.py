"""The table of families in `jaxpage/README.md` is what the tests' parameters say."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpage.models.registry import REGISTRY
from tests import checkpoints, dense_families, mixtures, support

README = Path(__file__).parent.parent / "jaxpage" / "README.md"


def test_the_readme_has_the_table():
    text = README.read_text(encoding="utf-8")
    assert support.table() in text and support.picture_table() in text, (
        "put what `python -m tests.support` prints into jaxpage/README.md"
    )


def test_the_rows_are_the_families_of_the_tests():
    assert set(support.FAMILIES) == {
        *checkpoints.VARIANTS,
        *dense_families.VARIANTS,
        *mixtures.VARIANTS,
    }


@pytest.mark.parametrize("feature", support.FEATURES)
def test_all_families_with_cases_have_a_row(feature):
    found = support.tested_families(feature)
    assert found and found <= set(support.FAMILIES)


def test_cases_are_chosen_by_their_kind():
    test = "tests.end_to_end.test_gemma3_pictures:test_greedy_tokens_equal_transformers"
    assert support.tested((test,)) == support.tested((f"{test}=pictures",)) == {"gemma3"}
    assert support.tested((f"{test}=videos",)) == set()


# Of models that take pictures, where only the text part is served: test_gemma4.py of models.
TEXT_ONLY = {"Gemma4UnifiedForConditionalGeneration"}
# Two names of a model without pictures, and two rows for an architecture.
ALIKE = {"gemma4unified": "gemma4", "gemma4moe": "gemma4"}
ALIKE |= dict.fromkeys(("granitehybrid", "granitehybridmoe"), "granitemoehybrid")
ALIKE |= {"nemotronhmoe": "nemotronh"}


@pytest.mark.parametrize(
    ("ending", "families"),
    [
        ("ForCausalLM", support.FAMILIES),
        ("ForConditionalGeneration", support.PICTURE_FAMILIES),
    ],
)
def test_every_architecture_has_a_row(ending, families):
    # GPT-2's name is the only one with this ending.
    known = {name.replace("LMHeadModel", "ForCausalLM") for name in set(REGISTRY) - TEXT_ONLY}
    names = [name.removesuffix(ending) for name in known if name.endswith(ending)]

    def architectures(found):
        plain = {name.replace("_", "").lower() for name in found}
        return {ALIKE.get(name, name) for name in plain}

    assert architectures(names) == architectures(families)
