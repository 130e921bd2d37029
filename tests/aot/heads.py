"""Steps with an EAGLE-3 head, of one model with two layers: those of `drafts`, in which the head takes the place of the
draft model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxpage.aot.targets import parse_target
from tests.aot.drafts import MODEL, NUM_DRAFTS, PLACES, ROWS, TARGETS
from tests.aot.program import Program
from tests.aot.steps import FEW, MODELS, environment, look, lower

__all__ = ["TARGETS", "environment", "programs"]

HEAD = MODELS[MODEL] | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
    "eagle_aux_hidden_state_layer_ids": [*range(FEW + 1)],
}


def programs(target: str) -> Iterator[Program]:
    """The step of `ROWS` rows with drafts, the largest decode step, and the largest program in which it drafts."""
    from jaxpage.aot.worker import make_job
    from jaxpage.runner.buckets import draft_name

    place = PLACES[TARGETS.index(target)]
    with tempfile.TemporaryDirectory() as folder:
        model, head = Path(folder) / "model.json", Path(folder) / "head.json"
        model.write_text(json.dumps(MODELS[MODEL] | {"num_hidden_layers": FEW}))
        head.write_text(json.dumps(HEAD))
        drafts = {"model": str(head), "num_speculative_tokens": NUM_DRAFTS}
        options = {"model": str(model), "speculative_config": drafts}
        job = make_job(options, parse_target(place.target), place.num_devices)
        buckets, rows = job.spec.buckets, job.spec.config.max_num_seqs
        most = ROWS * (1 + NUM_DRAFTS)
        forward = min(b.name for b in buckets if not b.decode and b.num_tokens >= most)
        decode = [b.name for b in buckets if b.decode][-1]
        for name in (forward, decode, draft_name(rows)):
            yield Program(
                name=name,
                lower=partial(lower, job, name),
                look=partial(look, job, MODEL, name),
            )
