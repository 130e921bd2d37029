"""The largest steps of a model, given as its config.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.targets import parse_target
from tests.aot.steps import Place

if TYPE_CHECKING:
    from jaxpage.aot.worker import CompileJob


def largest_steps(
    place: Place, config: dict[str, Any], **options: Any
) -> tuple[CompileJob, list[str]]:
    """What compiles them, and the names of the largest decode step and the largest of prompts."""
    from jaxpage.aot.worker import make_job

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{place.whole}.json"
        path.write_text(json.dumps(config))
        options = {"model": str(path), "max_model_len": 32768} | options
        job = make_job(options, parse_target(place.target), place.num_devices)
    decode = [bucket.name for bucket in job.spec.buckets if bucket.decode][-1]
    return job, [decode, job.spec.buckets[-1].name]
