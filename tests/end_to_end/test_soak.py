"""Random work under pressure while things fail: nothing leaks, no token is wrong.

python -m tests.end_to_end.test_soak 600      # ten minutes of it, half with each model
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.runner.pack import _transfers
from tests import checkpoints

MAX_MODEL_LEN, BLOCK_SIZE = 96, 8
# Enough for one of the longest sequences and little more: of one KV-cache group, of three (two with a window).
NUM_BLOCKS = {"llama": 14, "gemma3": 36}
NUM_HOST_BLOCKS = {"llama": 24, "gemma3": 72}
NUM_TASKS = 40
FAILURES = ("out of memory", "after the moves", "collect", "interrupt", "disk full", "torn files")


def make_llm(folder: Path, num_blocks: int, **options) -> LLM:
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "block_size": BLOCK_SIZE}
    return checkpoints.make_llm(folder, num_gpu_blocks_override=num_blocks, **limits, **options)


def make_tasks(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, many with a common beginning, and all kinds of params."""
    beginnings = [[rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
    tasks = []
    for i in range(NUM_TASKS):
        rest = [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(rng.randrange(2, 30))]
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)) if i % 4 else 1.0,
            n=1 if i % 4 else 3,
            seed=i,
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            max_tokens=rng.randrange(2, 30),
            ignore_eos=True,
            detokenize=False,
        )
        tasks.append((rng.choice([*beginnings, []]) + rest, params))
    return tasks


class Trouble:
    """Makes the engine's device and disk fail now and then."""

    def __init__(self, llm: LLM, disk: Path, rng: random.Random):
        self.runner, self.disk, self.rng = llm._engine.runner, disk, rng
        self.next: str | None = None
        self.seen: Counter[str] = Counter()
        self._launch, self._collect = self.runner.launch, self.runner.collect
        self._replace = os.replace
        self.runner.launch, self.runner.collect = self.launch, self.collect

    def plan(self) -> None:
        """Choose what goes wrong in the next step, if anything."""
        self.next = self.rng.choice(FAILURES) if self.rng.random() < 0.05 else None
        if self.next in ("disk full", "torn files"):
            self.seen[self.next] += 1
        if self.next == "torn files":
            for file in self.disk.rglob("*"):
                if file.is_file() and self.rng.random() < 0.5:
                    file.write_bytes(file.read_bytes()[: self.rng.randrange(60)])

    def launch(self, plan):
        if self.next == "out of memory":
            self._raise(RuntimeError("RESOURCE_EXHAUSTED: out of memory, as told"))
        if self.next == "after the moves" and plan.transfers is not None:
            self.runner.execute(_transfers(plan.transfers))
            self._raise(RuntimeError("RESOURCE_EXHAUSTED: out of memory, as told"))
        if self.next == "disk full":
            os.replace = self._no_space
        try:
            return self._launch(plan)
        finally:
            os.replace = self._replace

    def collect(self, launched):
        result = self._collect(launched)
        if self.next == "collect":
            self._raise(RuntimeError("INTERNAL: as told"))
        if self.next == "interrupt":
            self._raise(KeyboardInterrupt("as told"))
        return result

    def _raise(self, error: BaseException) -> None:
        self.seen[str(self.next)] += 1
        self.next = None
        raise error

    def _no_space(self, source, target) -> None:
        raise OSError(28, "No space left on device")


def soak(family: str, folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Random work for so long. Returns how often what went wrong, requests counted too."""
    rng = random.Random(seed)
    checkpoints.build(family, 0, folder)
    tasks = make_tasks(rng)
    calm = make_llm(folder, 400, enforce_eager=True)
    expected = [
        [c.token_ids for c in output.outputs]
        for output in calm.generate([p for p, _ in tasks], [x for _, x in tasks], use_tqdm=False)
    ]
    with tempfile.TemporaryDirectory() as disk:
        swap_space = NUM_HOST_BLOCKS[family] * calm._engine.runner.pool_spec.bytes_per_block / 2**30
        options = {"swap_space": swap_space, "kv_offload_dir": disk, "preemption_mode": "swap"}
        llm = make_llm(folder, NUM_BLOCKS[family], **options)
        llm.wait_until_warm()
        trouble = Trouble(llm, Path(disk), rng)
        start, number, counts = time.monotonic(), 0, Counter()

        def goes_on() -> bool:
            """Longer on a slow machine, until everything has gone wrong once."""
            passed, all_seen = time.monotonic() - start, len(trouble.seen) == len(FAILURES)
            return passed < (seconds if all_seen else 10 * seconds)

        while goes_on() or llm.has_unfinished_requests():
            if goes_on() and llm.get_num_unfinished_requests() < 8:
                task = rng.randrange(NUM_TASKS)
                llm.add_request(f"{task} {number}", *tasks[task])
                number += 1
            if rng.random() < 0.02:
                llm.abort_request(f"{task} {number - 1}")
            trouble.plan()
            try:
                outputs = llm.step()
            except (RuntimeError, KeyboardInterrupt) as error:
                assert "as told" in str(error)
                continue
            for output in outputs:
                if output.finished:
                    counts["requests"] += 1
                    task = int(output.request_id.split()[0])
                    check(output, expected[task], counts)
        stats = llm.stats()
        assert stats.kv_cache_usage == 0 and stats.num_running == stats.num_waiting == 0
        assert stats.num_recompiles == 0
        counts["preemptions"] = stats.num_preemptions
        counts["swapped in"] = stats.num_blocks_swapped_in
        counts["disk hits"] = stats.num_disk_hit_blocks
    return counts + trouble.seen


def check(output, expected: list[list[int]], counts: Counter[str]) -> None:
    """Whole answers are the expected ones; what was cut off is the beginning of one."""
    for completion in output.outputs:
        wanted = expected[completion.index]
        assert completion.token_ids == wanted[: len(completion.token_ids)]
        if completion.finish_reason == "abort":
            counts["aborted"] += 1
        else:
            assert completion.token_ids == wanted


# Of several KV-cache groups; the other family has one, and is run by hand.
@pytest.mark.slow
def test_random_work_and_failures(tmp_path):
    counts = soak("gemma3", tmp_path, seconds=8, seed=0)
    assert all(counts[failure] for failure in FAILURES), counts
    assert counts["preemptions"] and counts["swapped in"] and counts["disk hits"], counts


if __name__ == "__main__":
    for family in NUM_BLOCKS:
        with tempfile.TemporaryDirectory() as folder:
            print(family, soak(family, Path(folder), float(sys.argv[1]) / len(NUM_BLOCKS), seed=1))
