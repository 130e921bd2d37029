"""Configs of the families of `tests/dense_families.py`: what is read of them, and what is refused."""

from __future__ import annotations

import pytest
import transformers

from jaxpage.models.registry import build
from jaxpage.models.rope import NO_ROPE
from tests import checkpoints, dense_families

ARCHITECTURES = {"GPT2Config": "GPT2LMHeadModel"}


def config_of(family: str, variant: int = 0, **overrides) -> transformers.PretrainedConfig:
    name = dense_families.CLASSES[family]
    sizes = {"vocab_size": checkpoints.VOCAB_SIZE, "intermediate_size": 72, "pad_token_id": 0}
    made = getattr(transformers, name)(
        **sizes | dense_families.VARIANTS[family][variant] | overrides
    )
    made.architectures = [ARCHITECTURES.get(name, name.replace("Config", "ForCausalLM"))]
    return made


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "with use_qk_norm: .* not supported; use a checkpoint"),
        (
            "smollm3",
            {"no_rope_layers": [1], "layer_types": ["full_attention"] * 4},
            "no_rope_layers has 1 entries for 4 layers",
        ),
        ("starcoder2", {"hidden_act": "relu6"}, "Starcoder2ForCausalLM: activation 'relu6'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ("gpt_neox", {"hidden_act": "relu6"}, "GPTNeoXForCausalLM: activation 'relu6'"),
        ("gpt2", {"activation_function": "relu6"}, "GPT2LMHeadModel: activation 'relu6'"),
        ("phi", {"tie_word_embeddings": True}, "the head has a bias of its own"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is set"),
        ("gpt2", {"num_attention_heads": 5}, "n_embd 64 is not a multiple of n_head 5"),
        ("olmo2", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
    ],
)
def test_options_that_are_not_supported_are_refused(family, overrides, message):
    with pytest.raises(ValueError, match=message):
        build(config_of(family, **overrides), dtype="float32")


@pytest.mark.parametrize(
    ("family", "variant", "layers"),
    [
        ("smollm3", 0, [3]),
        ("smollm3", 1, [0, 2]),
        ("cohere", 0, []),
        ("cohere2", 0, [3]),
        ("cohere2", 1, [0]),
        ("exaone4", 0, [3]),
        ("exaone4", 1, []),  # without windows every layer knows positions
    ],
)
def test_layers_that_do_not_know_positions(family, variant, layers):
    model = build(config_of(family, variant), dtype="float32")
    ropes = model.config.ropes
    assert [index for index, rope in enumerate(ropes) if rope == NO_ROPE] == layers
