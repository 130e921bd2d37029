"""What a decode step of `LLM.step()` costs the host, by what its requests ask for: `python -m tests.bench.llm_step`.

The device is a stand-in that answers each plan at once; its own time is taken off. What remains is planning the step,
taking in its tokens, and making text and outputs of them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np

from jaxpage import tiny
from jaxpage.config import EngineConfig, load_hf_config
from jaxpage.engine.engine import Engine
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.llm import LLM
from jaxpage.plan import StepPlan, StepResult
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.tokenizer import load_tokenizer

NUM_ROWS, CONTEXT, NUM_STEPS, NUM_TOP = 256, 512, 100, 5
PLAIN = {"detokenize": False}
CASES = {
    "ids": PLAIN,
    "text": {},
    "text and a stop string": {"stop": ["never to be found"]},
    "ids and 5 logprobs": PLAIN | {"logprobs": NUM_TOP},
    "text and 5 logprobs": {"logprobs": NUM_TOP},
}


class Stub:
    """Answers each plan with one token a row, and adds up the seconds that this takes."""

    num_recompiles = 0

    def __init__(self):
        self.seconds = 0.0

    def weights_changed(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepResult:
        start = time.thread_time()
        steps, rows = plan.num_steps, len(plan.slots)
        best = np.tile(np.arange(300, 300 + NUM_TOP, dtype=np.int32), (steps, rows, 1))
        result = StepResult(
            token_ids=np.full((steps, rows), 300, np.int32),
            num_sampled=np.where(plan.samples, steps, 0).astype(np.int32),
            logprobs=np.full((steps, rows), -0.5, np.float32),
            ranks=np.ones((steps, rows), np.int32),
            top_token_ids=best,
            top_logprobs=np.full(best.shape, -0.5, np.float32),
        )
        self.seconds += time.thread_time() - start
        return result

    def collect(self, result: StepResult) -> StepResult:
        return result


def make_llm(folder: str) -> tuple[LLM, Stub]:
    hf_config, tokenizer, stub = load_hf_config(folder), load_tokenizer(folder), Stub()
    length = CONTEXT + NUM_STEPS + 8
    options = EngineConfig(model=folder, max_model_len=length)
    scheduler = Scheduler(
        KVCache(1 + NUM_ROWS * (length // 16 + 1), 16, enable_prefix_caching=True),
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=NUM_ROWS * CONTEXT,
        max_model_len=length,
    )
    built = SimpleNamespace(
        engine=Engine(scheduler, stub, overlap=False),
        config=options.resolve(hf_config, platform="cpu"),
        tokenizer=tokenizer,
        vocab_size=512,
        eos_token_ids=(2,),
        default_sampling={},
    )
    return LLM.from_built(built), stub


def microseconds(folder: str, **params) -> list[float]:
    """Of each step of 256 running requests, without the stand-in's."""
    llm, stub = make_llm(folder)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True, **params)
    for number in range(NUM_ROWS):
        ids = rng.integers(3, 500, CONTEXT - 1).tolist()
        llm.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    llm.step()
    times = []
    for _ in range(NUM_STEPS):
        stub.seconds, start = 0.0, time.thread_time()
        llm.step()
        times.append(1e6 * (time.thread_time() - start - stub.seconds))
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(tiny.build(scratch + "/tiny"))
        print(f"{NUM_ROWS} rows from {CONTEXT} tokens, microseconds of CPU a step: median (p90)")
        for kind in RequestOutputKind:
            for name, params in CASES.items():
                times = microseconds(folder, output_kind=kind, **params)
                p90 = np.percentile(times, 90)
                print(f"{kind.name:11} {name:24} {statistics.median(times):7.0f} ({p90:.0f})")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
