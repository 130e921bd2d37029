"""The engine with a model of Qwen2.5-3B's shape and random weights: decode steps, a shared table, start-up."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpage import LLM, SamplingParams, tiny
from jaxpage.bench.engines import Options, Work, run_llm
from jaxpage.bench.offline import QWEN25_05B
from jaxpage.bench.peers import PeerProcess, starts
from jaxpage.bench.results import Bar, Context, Result, error_summary, failed, measured, missing
from jaxpage.bench.workloads import equal_requests, run_interleaved

QWEN25_3B: dict[str, Any] = QWEN25_05B | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
}
ALONE, TOGETHER = Bar("<=", 1.25), Bar("<=", 1.4)  # over the time to read what a step must read
FASTER = Bar(">=", 3.0)
REUSED = Bar("<=", 0.25)  # second time to first token over the first
WARM = {"cold": Bar("<=", 60.0), "cached": Bar("<=", 8.0)}
CONTINUOUS = "transformers' continuous batching"
TIME_LIMIT = 40.0  # seconds after which no further round begins


@dataclass(frozen=True)
class ServingLoad:
    """The model and its load."""

    config: dict[str, Any]
    max_model_len: int
    batch: int
    context: int
    launches: int  # timed together, as a window
    windows: int  # how many
    # Of the two runs whose difference counts: whole launches, and prefill is done before the shorter run ends.
    num_tokens: tuple[int, int]
    rounds: int
    prompt: int  # tokens of the table
    questions: int


FULL = ServingLoad(QWEN25_3B, 2048, 64, 1024, 10, 3, (49, 97), 2, prompt=1848, questions=20)
TINY = ServingLoad(tiny.TINY_CONFIG, 256, 4, 32, 2, 1, (9, 41), 1, prompt=100, questions=2)


def weight_bytes(config: dict[str, Any]) -> int:
    """Bytes that a decode step reads of a Qwen2 model in bfloat16: all weights except an untied embedding."""
    E, F, L = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    D = E // H
    layer = E * (H + 2 * K) * D + (H + 2 * K) * D + H * D * E + 3 * E * F + 2 * E
    return 2 * (config["vocab_size"] * E + L * layer + E)


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of K and V of one token in bfloat16, over all layers."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def _start(context: Context, load: ServingLoad, **options: Any) -> LLM:
    """An engine with all its programs (tiny: only those it uses), cached in the suite's folder for later parts."""
    llm = LLM(
        str(_folder(context, load)),
        load_format="dummy",
        max_model_len=load.max_model_len,
        max_num_seqs=load.batch,
        max_num_batched_tokens=load.max_model_len,
        enforce_eager=context.tiny,
        skip_tokenizer_init=True,
        compilation_cache_dir=str(Path(context.folder) / "cache"),
        **options,
    )
    llm.wait_until_warm()
    return llm


def _folder(context: Context, load: ServingLoad) -> Path:
    """A folder with only config.json, for random weights."""
    folder = Path(context.folder) / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(load.config))
    return folder


def _work(load: ServingLoad, seed: str, number: int, length: int, num_tokens: int) -> Work:
    """`number` requests with random prompts of that length."""
    return equal_requests(
        random.Random(seed), number, length, num_tokens, load.config["vocab_size"]
    )


def steps(context: Context) -> Iterator[Result]:
    """Decode steps of one sequence and of many, compared with the time to read the bytes, and with transformers."""
    load = TINY if context.tiny else FULL
    device = jax.devices()[0].device_kind
    llm = _start(context, load, enable_prefix_caching=False)
    weights = weight_bytes(load.config)
    for batch, bar in ((1, ALONE), (load.batch, TOGETHER)):
        seconds, length = step_seconds(llm, load, batch)
        name = f"decode step, batch {batch}"
        yield measured(name, seconds * 1e3, "ms", context=length, tokens_per_second=batch / seconds)
        needed = weights + (0 if batch == 1 else round(batch * length * kv_bytes(load.config)))
        over = f"{name}, time over that of reading {'weights' if batch == 1 else 'weights and KV'}"
        if context.bandwidth is None:
            yield missing(over, "x", "the bandwidth was not measured", bar)
            continue
        ratio = seconds / (needed / context.bandwidth)
        yield measured(over, ratio, "x", bar, device=device, bytes=needed)
    yield from _against_transformers(llm, context, load, device)


def step_seconds(llm: LLM, load: ServingLoad, batch: int) -> tuple[float, float]:
    """Seconds of a decode step as a user sees it, median of windows; and the mean context meanwhile, in tokens."""
    names = [f"{batch}-{number}" for number in range(batch)]
    more = load.max_model_len - load.context
    work = _work(load, f"steps {batch}", batch, load.context, more)
    params = SamplingParams(temperature=0, max_tokens=more, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, work.prompts, strict=True):
        llm.add_request(name, {"prompt_token_ids": prompt}, params)

    def known() -> int:
        """Tokens of the last request after one more launch has been read."""
        while True:
            for output in llm.step():
                if output.request_id == names[-1]:
                    return len(output.outputs[0].token_ids)

    before = after = 0
    for _ in range(4):  # the first launches of this size compile, and overlapping starts
        before = known()
    first, taken = before, []
    for _ in range(load.windows):
        start = time.perf_counter()
        for _ in range(load.launches):
            after = known()
        taken.append((time.perf_counter() - start) / (after - before))
        before = after
    llm.abort_request(names)
    return statistics.median(taken), load.context + (first + before) / 2


def _against_transformers(
    llm: LLM, context: Context, load: ServingLoad, device: str
) -> Iterator[Result]:
    name = f"decode rate to {CONTINUOUS}, batch {load.batch}"
    try:
        taken, versions = _run_interleaved(llm, context, load)
    except jax.errors.JaxRuntimeError:
        raise  # jaxpage's; errors of transformers are plain RuntimeErrors here
    except (RuntimeError, TimeoutError, ValueError) as error:
        print(error, file=sys.stderr)
        yield missing(name, "x", error_summary(error), FASTER)
        return
    more = load.batch * (load.num_tokens[1] - load.num_tokens[0])
    rates = {
        engine: statistics.median(more / (long - short) for short, long in pairs)
        for engine, pairs in taken.items()
    }
    if min(rates.values()) <= 0:
        yield failed(name, f"the longer run did not take longer: {taken}", FASTER)
        return
    for engine, rate in rates.items():
        yield measured(f"decode rate, {engine}, batch {load.batch}", rate, "tokens/s")
    ratio = rates["jaxpage"] / rates[CONTINUOUS]
    details = {"seconds": taken, "num_tokens": load.num_tokens, "versions": versions}
    yield measured(name, ratio, "x", FASTER, device=device, **details)


def _run_interleaved(
    llm: LLM, context: Context, load: ServingLoad
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Seconds of a short and a long run in each round, by engine; and their versions."""
    rounds = [
        [_work(load, f"{number} {n}", load.batch, load.context, n) for n in load.num_tokens]
        for number in range(load.rounds + 1)
    ]
    del rounds[0][1:]  # the short run warms up
    options = Options(
        max_model_len=load.context + max(load.num_tokens),
        max_num_seqs=load.batch,
        enable_prefix_caching=False,
    )
    with PeerProcess("transformers-continuous") as peer:
        versions = peer.setup(_folder(context, load), options, timeout=120)
        runners: dict[str, Callable[[Work], float]] = {
            "jaxpage": lambda work: run_llm(llm, SamplingParams, work)[0],
            CONTINUOUS: lambda work: peer.run(work, timeout=150),
        }
        return run_interleaved(runners, rounds, time_limit=TIME_LIMIT), versions


def table(context: Context) -> Iterator[Result]:
    """Each long prompt twice; the second time its blocks are cached. Medians over all prompts but the first."""
    load = TINY if context.tiny else FULL
    llm = _start(context, load, enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    taken: list[list[float]] = []
    for prompt in _work(load, "table", 1 + load.questions, load.prompt, 1).prompts:
        taken.append([])
        for _ in range(2):
            start = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            taken[-1].append(time.perf_counter() - start)
    first, second = (statistics.median(times[i] for times in taken[1:]) for i in (0, 1))
    name, device = f"{load.prompt} tokens", jax.devices()[0].device_kind
    yield measured(f"{name}, first time to first token", first * 1e3, "ms")
    yield measured(f"{name}, second time to first token", second * 1e3, "ms")
    details = {"seconds": taken, "cached_tokens": output.num_cached_tokens}
    yield measured(
        f"{name}, second over first", second / first, "x", REUSED, device=device, **details
    )


def warm_up(context: Context) -> Iterator[Result]:
    """Seconds from before the first import until all programs are ready, in fresh processes, with default sizes."""
    load = TINY if context.tiny else FULL
    options: dict[str, Any] = {"load_format": "dummy"}
    if context.tiny:
        options |= {"max_model_len": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    threads, device = len(os.sched_getaffinity(0)), jax.devices()[0].device_kind
    for cache, events in starts(_folder(context, load), options, threads=threads):
        yield measured(f"start, {cache}", events["warm"], "s", WARM[cache], device=device, **events)
