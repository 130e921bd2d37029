"""Steps with drafts, of one model with two layers: by prompt lookup, a few tokens of each row and the program that
checks them; with a draft model, what it makes them with, and what it computes besides.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.aot.targets import parse_target
from tests.aot.program import Program
from tests.aot.steps import FEW, MODELS, Place, environment, look, lower

__all__ = ["TARGETS", "environment", "programs"]

MODEL, DRAFT_MODEL, NUM_DRAFTS, ROWS = "3B", "0.5B", 4, 64
PLACES = (
    Place("v6e:2x2", 1, MODEL),
    Place("v6e:2x2", 4, MODEL),
    Place("h200", 1, MODEL),
)
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    """The step of `ROWS` rows with their drafts, and both programs that check drafts; then the same step with a draft
    model, and the largest program in which it drafts.
    """
    from jaxpage.runner.buckets import draft_name, verify_name

    place = PLACES[TARGETS.index(target)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.json" for name in (MODEL, DRAFT_MODEL)}
        for name, path in paths.items():
            path.write_text(json.dumps(MODELS[name] | {"num_hidden_layers": FEW}))
        options = {"model": str(paths[MODEL])}
        by_lookup = _job(place, options, method="ngram")
        by_model = _job(place, options, model=str(paths[DRAFT_MODEL]))
        rows = by_lookup.spec.config.max_num_seqs
        forward = min(
            b.name
            for b in by_lookup.spec.buckets
            if not b.decode and b.num_tokens >= ROWS * (1 + NUM_DRAFTS)
        )
        few = verify_name(by_lookup.spec.buckets[-1].sample_rows(1))
        chosen = [(by_lookup, name) for name in (forward, few, verify_name(rows))]
        chosen += [(by_model, name) for name in (forward, draft_name(rows))]
        for job, name in chosen:
            with_model = " with a draft model" if job is by_model and name == forward else ""
            yield Program(
                name=name + with_model,
                lower=partial(lower, job, name),
                look=partial(look, job, MODEL, name),
            )


def _job(place: Place, options: dict[str, Any], **speculative: str):
    from jaxpage.aot.worker import make_job

    config = {"num_speculative_tokens": NUM_DRAFTS, **speculative}
    options = options | {"speculative_config": config}
    return make_job(options, parse_target(place.target), place.num_devices)
