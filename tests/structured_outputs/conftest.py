"""Two engines for all tests of this folder that need no other: of the demo's model, and one that is compiled sooner."""

from __future__ import annotations

import pytest

from jaxpage import LLM
from jaxpage.demo import checkpoint
from tests import checkpoints


def make_llm(**options) -> LLM:
    """With a tokenizer, room for many short answers at once, and `options` on top."""
    sizes = {"max_model_len": 512}
    return checkpoints.make_llm(checkpoint(), skip_tokenizer_init=False, **(sizes | options))


@pytest.fixture(scope="package")
def demo_llm() -> LLM:
    return make_llm()


@pytest.fixture(scope="package")
def random_llm() -> LLM:
    """With one layer of random weights: what it says is of its grammar all the same."""
    return make_llm(load_format="dummy", hf_overrides={"num_hidden_layers": 1})
