"""Steps of models whose layers have a recurrent state, but for every fourth: Qwen3.5, a dense one and one with experts,
and Granite 4. Each with eight layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import copies_of_size, kernel_calls
from jaxpage.aot.hlo import parse
from tests.aot.largest import largest_steps
from tests.aot.program import Program
from tests.aot.steps import Place, environment, look, lower

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

__all__ = ["TARGETS", "environment", "programs"]

LAYERS, ATTENTION_LAYERS = 8, 2
_ALL = {
    "vocab_size": 248320,
    "num_hidden_layers": LAYERS,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
# The shapes of 4B and 35B-A3B.
MODELS: dict[str, dict[str, Any]] = {
    "4B": _ALL
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "35B-A3B": _ALL
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "granite-4-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "num_hidden_layers": LAYERS,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * ATTENTION_LAYERS,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
}
PLACES = (
    Place("v6e:2x2", 1, "4B"),
    Place("v6e:2x2", 4, "35B-A3B"),
    Place("h200", 1, "4B"),
    Place("h200:4", 4, "35B-A3B"),
    # One of them: "h200 TP 1" is the name of the dense model's.
    Place("h200:2", 1, "granite-4-h-micro"),
    Place("v5e:2x2", 1, "granite-4-h-micro"),
)
TARGETS = tuple(place.name for place in PLACES)
WITH_DRAFTS = " with drafts"
NUM_DRAFTS, ROWS_WITH_DRAFTS = 3, 32


def programs(target: str) -> Iterator[Program]:
    """The largest decode step, the largest of prompts, and what copies states to and from the prefix cache; then of an
    engine with drafts the largest decode step, and that of some rows with their drafts.
    """
    from jaxpage.runner.calls import COPY_STATES

    place = PLACES[TARGETS.index(target)]
    job, names = largest_steps(place, MODELS[place.whole])
    chosen = [(job, name, name) for name in (*names, COPY_STATES)]
    speculative = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    job, (decode, _) = largest_steps(place, MODELS[place.whole], speculative_config=speculative)
    forward = next(
        bucket.name
        for bucket in job.spec.buckets
        if not bucket.decode and bucket.num_tokens >= ROWS_WITH_DRAFTS * (1 + NUM_DRAFTS)
    )
    chosen += [(job, name, name + WITH_DRAFTS) for name in (decode, forward)]
    for job, name, title in chosen:
        yield Program(
            name=title,
            lower=partial(lower, job, name),
            look=partial(_look, job, place, name),
            observers=(sys.modules[__name__],),
        )


def _look(
    job: CompileJob, place: Place, name: str, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    """Also what is made as large as the states of a layer, and the kernels that change these."""
    contents = parse(compiled.as_text() or "")
    sizes, num_slots = job.spec.model.config.recurrent, job.spec.step_spec.cached_state_slots.stop
    assert sizes is not None
    num_keys, *others = sizes.state_shape
    states = (num_slots, num_keys // place.num_devices, *others)
    return look(job, place.whole, name, compiled, log) | {
        "state_copies": list(copies_of_size(contents, [states])),
        "state_calls": sum(
            "delta_rule" in call or "mamba2" in call for call, _ in kernel_calls(contents)
        ),
    }
