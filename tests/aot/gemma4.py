"""Steps of two models of Gemma 4, whose layers differ in heads: one with a vocabulary of embeddings for each layer and
layers that read the keys and values of others, one with experts. Each with twelve layers, of which two see all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.aot.largest import largest_steps
from tests.aot.program import Program
from tests.aot.steps import Place, environment, look, lower

__all__ = ["TARGETS", "environment", "programs"]

LAYERS = 12
_ALL = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "num_hidden_layers": LAYERS,
    "layer_types": 2 * [*5 * ["sliding_attention"], "full_attention"],
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
# The shapes of E4B and 26B-A4B.
MODELS: dict[str, dict[str, Any]] = {
    "E4B": _ALL
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 6,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "26B-A4B": _ALL
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
PLACES = (Place("v6e:2x2", 1, "E4B"), Place("v6e:2x2", 4, "26B-A4B"), Place("h200", 1, "E4B"))
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    """The largest decode step, and the largest of prompts."""
    place = PLACES[TARGETS.index(target)]
    job, names = largest_steps(place, MODELS[place.whole])
    for name in names:
        yield Program(
            name=name,
            lower=partial(lower, job, name),
            look=partial(look, job, place.whole, name),
        )
