"""Gemma 4 in whole engines: its layers share arrays of the pool, keys and values, and have embeddings of their own."""

from __future__ import annotations

import pytest

from tests import dense_families
from tests.checkpoints import make_llm


def test_embeddings_as_prompts_are_refused_where_layers_have_their_own(tmp_path):
    """They are of tokens, which such a prompt does not have."""
    path = dense_families.build("gemma4", 0, tmp_path)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True: Gemma4ForCausalLM has an emb"):
        make_llm(path, enable_prompt_embeds=True)
