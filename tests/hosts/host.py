"""One host of an engine: `python -m tests.hosts.host JSON`, where JSON is the fields of `Job`.

A leader prints a line of JSON for each batch of answers, which also says where its programs are from, and one of an
error that ends it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage import SamplingParams
from jaxpage.hosts.errors import HostLostError
from tests import checkpoints
from tests.end_to_end.test_replay import OPTIONS, work


@dataclass(kw_only=True)
class Job:
    """What a host does: `work` once, then batches of a few requests."""

    model: str
    mixed_requests: int = 0  # of `work`
    batches: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self, **options: Any) -> str:
        """For one host, with options of its own."""
        job = dataclasses.replace(self, options=self.options | options)
        return json.dumps(dataclasses.asdict(job))


def answers(outputs) -> list:
    """Tokens and log-probabilities of all continuations."""
    return [[list(c.token_ids), c.cumulative_logprob] for output in outputs for c in output.outputs]


def origins(llm) -> list[str]:
    """Of the programs so far."""
    return sorted({program.origin for program in llm.programs() if program.origin is not None})


def batch(number: int) -> tuple[list[dict], list[SamplingParams]]:
    rng = np.random.default_rng(number)
    prompts = [rng.integers(3, checkpoints.VOCAB_SIZE, 9).tolist() for _ in range(3)]
    params = [SamplingParams(max_tokens=12, temperature=i / 2, seed=i) for i in range(3)]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def main(job: Job) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    options = OPTIONS | {"max_num_seqs": 8} | job.options
    llm = checkpoints.make_llm(job.model, **options)
    say({"ready": True})
    try:
        if job.mixed_requests:
            outputs = work(llm, job.mixed_requests)
            say({"answers": answers(outputs), "origins": origins(llm)})
        for number in range(job.batches):
            outputs = llm.generate(*batch(number), use_tqdm=False)
            say({"answers": answers(outputs), "origins": origins(llm)})
    except HostLostError as error:
        say({"error": str(error)})
        raise
    stats = llm.stats()
    llm.wait_until_warm()  # otherwise not all programs are stored
    say({"preemptions": stats.num_preemptions, "swapped in": stats.num_blocks_swapped_in})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
