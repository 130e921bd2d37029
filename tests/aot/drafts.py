"""Steps with drafts: a few tokens of each row, and the program that checks them. Of one model, with two layers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxpage.aot.targets import parse_target
from tests.aot.program import Program
from tests.aot.steps import FEW, MODELS, Place, environment, look, lower

__all__ = ["TARGETS", "environment", "programs"]

MODEL, NUM_DRAFTS, ROWS = "3B", 4, 64
PLACES = (
    Place("v6e:2x2", 1, MODEL),
    Place("v6e:2x2", 4, MODEL),
    Place("h200", 1, MODEL),
)
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    """The step of `ROWS` rows with their drafts, and the largest program that checks drafts."""
    from jaxpage.aot.worker import make_job
    from jaxpage.runner.buckets import verify_name

    place = PLACES[TARGETS.index(target)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODELS[MODEL]))
        options = {
            "model": str(path),
            "hf_overrides": {"num_hidden_layers": FEW},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS},
        }
        job = make_job(options, parse_target(place.target), place.num_devices)
        num_tokens = ROWS * (1 + NUM_DRAFTS)
        forward = min(b for b in job.spec.buckets if not b.decode and b.num_tokens >= num_tokens)
        for name in (forward.name, verify_name(job.spec.config.max_num_seqs)):
            yield Program(
                name=name, lower=partial(lower, job, name), look=partial(look, job, MODEL, name)
            )
