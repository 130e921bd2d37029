"""The engine with a model of Qwen2.5-3B's shape and random weights: decode steps, a shared table, start-up.

Knows the public names of the engine. What transformers does with the same work is in `torch_peers.py`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpage import LLM, SamplingParams, tiny
from jaxpage.bench import warm_up as starts
from jaxpage.bench.children import Child
from jaxpage.bench.peers import Options, Work
from jaxpage.bench.results import Bar, Context, Result, failed, last_line, measured, missing

QWEN25_3B: dict[str, Any] = tiny.TINY_CONFIG | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
ALONE, TOGETHER = Bar("<=", 1.25), Bar("<=", 1.4)  # of the time to read what a step must read
FASTER = Bar(">=", 3.0)
REUSED = Bar("<=", 0.25)  # second time to first token over the first
WARM = {"cold": Bar("<=", 60.0), "cached": Bar("<=", 8.0)}
CONTINUOUS = "transformers' continuous batching"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    config: dict[str, Any]
    max_model_len: int = 2048
    batch: int = 64
    context: int = 1024
    launches: int = 10  # that are timed together
    windows: int = 3  # as often
    # Of the two runs whose difference counts: whole launches, and the prompts are done before the shorter one ends.
    num_tokens: tuple[int, int] = (49, 97)
    rounds: int = 2
    patience: float = 40.0  # seconds, after which no further round begins
    prompt: int = 1848  # tokens, of the table
    questions: int = 20


FULL = Sizes(config=QWEN25_3B)
TINY = Sizes(
    config=tiny.TINY_CONFIG,
    max_model_len=256,
    batch=4,
    context=32,
    launches=2,
    windows=1,
    num_tokens=(9, 41),
    rounds=1,
    prompt=100,
    questions=2,
)


def weight_bytes(config: dict[str, Any]) -> int:
    """What a decode step reads of a Qwen2 model in bfloat16: every weight, but an embedding that is not the head."""
    E, F, L = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    D = E // H
    layer = E * (H + 2 * K) * D + (H + 2 * K) * D + H * D * E + 3 * E * F + 2 * E
    return 2 * (config["vocab_size"] * E + L * layer + E)


def kv_bytes(config: dict[str, Any]) -> int:
    """K and V of one token in bfloat16, all layers."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def _start(context: Context, sizes: Sizes, **options: Any) -> LLM:
    """An engine with all its programs. They are kept in the suite's folder, where a later part finds them."""
    folder = _folder(context, sizes)
    given = {
        "load_format": "dummy",
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.batch,
        "max_num_batched_tokens": sizes.max_model_len,
        "skip_tokenizer_init": True,
        "compilation_cache_dir": str(Path(context.folder) / "cache"),
    }
    llm = LLM(str(folder), **given, **options)
    llm.wait_until_warm()
    return llm


def _folder(context: Context, sizes: Sizes) -> Path:
    """With config.json alone: weights are random."""
    folder = Path(context.folder) / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config))
    return folder


def _prompts(sizes: Sizes, number: int, length: int, seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    vocabulary = sizes.config["vocab_size"]
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(number)]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def steps(context: Context) -> Iterator[Result]:
    """Decode steps of one sequence and of many, against the time to read the bytes; and against transformers."""
    sizes = TINY if context.tiny else FULL
    device = jax.devices()[0].device_kind
    llm = _start(context, sizes, enable_prefix_caching=False)
    weights = weight_bytes(sizes.config)
    for batch, bar in ((1, ALONE), (sizes.batch, TOGETHER)):
        seconds, length = step_seconds(llm, sizes, batch)
        name = f"decode step, batch {batch}"
        yield measured(name, seconds * 1e3, "ms", context=length, tokens_per_second=batch / seconds)
        needed = weights + (0 if batch == 1 else round(batch * length * kv_bytes(sizes.config)))
        over = f"{name}, time over that of reading {'weights' if batch == 1 else 'weights and KV'}"
        if context.bandwidth is None:
            yield missing(over, "x", "the bandwidth was not measured", bar)
            continue
        ratio = seconds / (needed / context.bandwidth)
        yield measured(over, ratio, "x", bar, device=device, bytes=needed)
    yield from _against_transformers(llm, context, sizes, device)


def step_seconds(llm: LLM, sizes: Sizes, batch: int) -> tuple[float, float]:
    """Seconds of a decode step as a user has them, median of windows; and the mean context meanwhile, in tokens."""
    names = [f"{batch}-{number}" for number in range(batch)]
    params = _params(sizes.max_model_len - sizes.context)
    prompts = _prompts(sizes, batch, sizes.context, f"steps {batch}")
    for name, prompt in zip(names, prompts, strict=True):
        llm.add_request(name, {"prompt_token_ids": prompt}, params)

    def known() -> int:
        """Tokens that the last request has, once a launch more has been read."""
        while True:
            for output in llm.step():
                if output.request_id == names[-1]:
                    return len(output.outputs[0].token_ids)

    before = known()
    for _ in range(3):  # the first launches of this size compile, and the overlap begins
        before = known()
    first, taken = before, []
    for _ in range(sizes.windows):
        start = time.perf_counter()
        for _ in range(sizes.launches):
            after = known()
        taken.append((time.perf_counter() - start) / (after - before))
        before = after
    llm.abort_request(names)
    return statistics.median(taken), sizes.context + (first + before) / 2


def _against_transformers(
    llm: LLM, context: Context, sizes: Sizes, device: str
) -> Iterator[Result]:
    name = f"decode rate to {CONTINUOUS}, batch {sizes.batch}"
    with Child("jaxpage.bench.torch_peers:ContinuousBatching") as child:
        options = Options(
            threads=len(os.sched_getaffinity(0)),
            max_model_len=sizes.context + max(sizes.num_tokens),
            max_num_seqs=sizes.batch,
            prefix_caching=False,
        )
        taken: dict[str, list[list[float]]] = {"jaxpage": [], CONTINUOUS: []}
        try:
            folder = str(_folder(context, sizes))
            versions = child.ask("setup", folder, asdict(options), timeout=120)
            warming = _work(sizes, "warming", sizes.num_tokens[0])
            _seconds(llm, warming)
            child.ask("seconds", asdict(warming), timeout=150)
            start = time.perf_counter()
            for number in range(sizes.rounds):
                if number > 0 and time.perf_counter() - start > sizes.patience:
                    break
                short, long = (_work(sizes, f"{number} {n}", n) for n in sizes.num_tokens)
                taken["jaxpage"].append([_seconds(llm, work) for work in (short, long)])
                taken[CONTINUOUS].append(
                    [child.ask("seconds", asdict(work), timeout=150) for work in (short, long)]
                )
        except jax.errors.JaxRuntimeError:
            raise  # ours; whatever happens to them is a plain RuntimeError here
        except (RuntimeError, TimeoutError) as error:
            print(error, file=sys.stderr)
            yield missing(name, "x", last_line(str(error)), FASTER)
            return
    more = sizes.batch * (sizes.num_tokens[1] - sizes.num_tokens[0])
    rates = {
        engine: statistics.median(more / (long - short) for short, long in pairs)
        for engine, pairs in taken.items()
    }
    if min(rates.values()) <= 0:
        yield failed(name, f"the longer run was not the slower one: {taken}", FASTER)
        return
    for engine, rate in rates.items():
        yield measured(f"decode rate, {engine}, batch {sizes.batch}", rate, "tokens/s")
    ratio = rates["jaxpage"] / rates[CONTINUOUS]
    details = {"seconds": taken, "num_tokens": sizes.num_tokens, "versions": versions}
    yield measured(name, ratio, "x", FASTER, device=device, **details)


def _work(sizes: Sizes, seed: str, num_tokens: int) -> Work:
    prompts = _prompts(sizes, sizes.batch, sizes.context, seed)
    return Work(prompts=prompts, num_tokens=[num_tokens] * sizes.batch, static_batch=sizes.batch)


def _seconds(llm: LLM, work: Work) -> float:
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    start = time.perf_counter()
    llm.generate(prompts, [_params(n) for n in work.num_tokens], use_tqdm=False)
    return time.perf_counter() - start


def table(context: Context) -> Iterator[Result]:
    """A long prompt twice: the second time its blocks are found. Medians over prompts, but the first."""
    sizes = TINY if context.tiny else FULL
    llm = _start(context, sizes, enable_prefix_caching=True)
    taken: list[list[float]] = []
    for prompt in _prompts(sizes, 1 + sizes.questions, sizes.prompt, "table"):
        taken.append([])
        for _ in range(2):
            start = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": prompt}, _params(1), use_tqdm=False)
            taken[-1].append(time.perf_counter() - start)
    first, second = (statistics.median(times[i] for times in taken[1:]) for i in (0, 1))
    name = f"{sizes.prompt} tokens"
    yield measured(f"{name}, first time to first token", first * 1e3, "ms")
    yield measured(f"{name}, second time to first token", second * 1e3, "ms")
    device = jax.devices()[0].device_kind
    details = {"seconds": taken, "cached_tokens": output.num_cached_tokens}
    yield measured(
        f"{name}, second over first", second / first, "x", REUSED, device=device, **details
    )


def warm_up(context: Context) -> Iterator[Result]:
    """Seconds from before the first import until all programs are there, in fresh processes; default sizes."""
    sizes = TINY if context.tiny else FULL
    options: dict[str, Any] = {"load_format": "dummy"}
    if context.tiny:
        options |= {"max_model_len": 64, "max_num_seqs": 2}
    threads = len(os.sched_getaffinity(0))
    device = jax.devices()[0].device_kind
    for cache, events in starts.starts(_folder(context, sizes), sys.executable, threads, options):
        yield measured(f"start, {cache}", events["warm"], "s", WARM[cache], device=device, **events)
