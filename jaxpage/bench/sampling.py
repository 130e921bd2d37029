"""`jaxpage bench sampling`: what the sampler adds to a decode step, feature by feature; and the cost of grammar masks.

Runs the sampler alone, compiled as in a step, with requests admitted as in an engine. Times are also given as shares of
a floor: no decode step of a 0.5B model is shorter than the time it takes to read the weights.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.bench import device_time, peaks, results
from jaxpage.bench.flags import check_least
from jaxpage.bench.workloads import random_prompt
from jaxpage.kv_groups import group_layers
from jaxpage.plan import Admission
from jaxpage.reasoning import ReasoningTokens
from jaxpage.request import Request
from jaxpage.runner.slots import (
    admission_layout,
    allocate_request_state,
    make_admit,
    pack_admission,
)
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.features import features_of, slot_fields_of
from jaxpage.sampling.fields import Processors, RequestState
from jaxpage.sampling.logprobs import score
from jaxpage.sampling.sampler import sample, vocabulary
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling_params import SamplingParams
from jaxpage.structured_outputs.params import StructuredOutputsParams

WEIGHT_BYTES = 2 * 494_032_768  # Qwen2.5-0.5B in bfloat16
NUM_TOP = 20  # vLLM's max_logprobs, for which programs are compiled
MODE = "raw"
BASELINE = "greedy"  # the case that all others are compared with
RANDOM = {"temperature": 1.0}
QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
GRAMMARS = {  # that outputs must match
    "JSON schema": StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "role": {"enum": ["reader", "author", "editor"]},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
                "address": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "postcode": {"type": "string"}},
                    "required": ["city"],
                },
            },
            "required": ["name", "age", "role", "tags", "address"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutputsParams(
        regex=r"([A-Za-z0-9._]{1,30}@[a-z0-9-]{1,30}\.(com|org|net), ){3}\d{4}-\d\d-\d\d"
    ),
}


@dataclass(frozen=True, kw_only=True)
class SamplingBench:
    """Time the sampler for each feature that requests may use, and the masks of grammars."""

    vocab_size: int = 151_936  # Qwen2.5's
    rows: int = 64
    context: int = 512  # known tokens of each request, half of them prompt
    repeats: int = 9  # of all cases, interleaved
    masks: int = 200  # of each grammar
    threads: int = 2  # to measure a CPU's bandwidth with
    tiny: bool = False  # meaningless sizes that take seconds
    json: Path | None = None  # all timings go to this file


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all rows of a step use. `options` are those of `SamplingParams`, `own` those of `Request`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    flat: bool = False  # logits with tens of thousands of likely tokens; else a few
    processors: Processors = ()  # of the engine


def main(bench: SamplingBench) -> None:
    """Measure, print two tables, and write all timings to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: SamplingBench) -> dict[str, Any]:
    """Milliseconds of each case, microseconds of each mask. Raises ValueError for bad sizes."""
    if bench.tiny:
        bench = replace(bench, vocab_size=2048, rows=4, context=32, repeats=2, masks=20)
    check_least(bench, vocab_size=1024, rows=1, context=2, repeats=1, masks=1, threads=1)
    return {
        "vocab_size": bench.vocab_size,
        "rows": bench.rows,
        "context": bench.context,
        "device": jax.devices()[0].device_kind,
        "bandwidth": _bandwidth(bench),
        "milliseconds": _sampler(bench),
        "load": os.getloadavg()[0],  # of the last minute: above `threads` if other processes ran
        "microseconds": _masks(bench),
    }


def _bandwidth(bench: SamplingBench) -> float:
    """Bytes per second read and written by a copy."""
    if jax.default_backend() == "cpu":
        size = 1 << 20 if bench.tiny else 1 << 30
        return peaks.memory_bandwidth(bench.threads, num_bytes=size)["copy"]
    found = next(peaks.measure(results.Context(tiny=bench.tiny, folder="")))
    assert found.value is not None
    return 1e9 * found.value


def cases(vocab_size: int) -> tuple[Case, ...]:
    """The plain step first; then each feature alone, except that top_k and top_p need random sampling; and the defaults
    of a checkpoint's generation_config.json.
    """
    constraints: dict[str, Any] = {
        "allowed_token_ids": list(range(0, vocab_size, 2)),
        "logit_bias": dict.fromkeys(range(10, 18), 1.0),
    }
    bad_words = {"bad_words_token_ids": ((12,), (14, 16), (18, 20, 22))}
    markers = ReasoningTokens(start=(7,), end=(8,), forced_end=(8,))
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    budget = {"thinking_token_budget": 100_000}
    return (
        Case(name=BASELINE),
        Case(name="allowed ids, bad words, logit bias", options=constraints, own=bad_words),
        Case(name="penalties", options=penalties),
        Case(
            name="thinking budget",
            options=budget,
            own={"reasoning": markers},
            processors=(THINKING,),
        ),
        Case(name="random", options=RANDOM),
        Case(name="random, top_k=40", options=RANDOM | {"top_k": 40}),
        Case(name="random, top_p=0.9", options=RANDOM | {"top_p": 0.9}),
        Case(name="random, top_p=0.9, flat logits", options=RANDOM | {"top_p": 0.9}, flat=True),
        Case(name="defaults of Qwen2.5", options=QWEN),
        Case(name=f"{NUM_TOP} top logprobs", options={"logprobs": NUM_TOP}),
    )


def _sampler(bench: SamplingBench) -> dict[str, list[float]]:
    """Milliseconds of each case, and of the programs for logprobs of the whole vocabulary and of given tokens."""
    draw = np.random.default_rng(0).standard_normal((bench.rows, bench.vocab_size), np.float32)
    peaked, flat = jnp.asarray(8 * draw), jnp.asarray(draw)
    slots = jnp.arange(1, bench.rows + 1, dtype=jnp.int32)
    positions = jnp.full(bench.rows, bench.context, jnp.int32)
    program = partial(sample, num_top_logprobs=NUM_TOP, logprobs_mode=MODE)
    programs: dict[Processors, Any] = {
        processors: jax.jit(partial(program, processors=processors))
        for processors in ((), (THINKING,))
    }
    whole = jax.jit(partial(vocabulary, logprobs_mode=MODE))
    scores = jax.jit(partial(score, num_top=NUM_TOP, logprobs_mode=MODE))

    def launch(program: Any, case: Case) -> Callable[[Any], Any]:
        state, features = _admitted(case, bench)
        logits = flat if case.flat else peaked
        return lambda _: program(logits, state, slots, positions, features)

    launches = {
        case.name: launch(programs[case.processors], case) for case in cases(bench.vocab_size)
    }
    launches["logprobs of the whole vocabulary"] = launch(whole, Case(name=BASELINE))
    launches["scores of given tokens"] = lambda _: scores(peaked, slots)
    # A CPU would compute independent launches in parallel.
    at_least = 0.0 if bench.tiny or jax.default_backend() == "cpu" else 0.02
    found: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(bench.repeats):
        for name, run in launches.items():
            (seconds,), _ = device_time.seconds(run, None, at_least=at_least, samples=1)
            found[name].append(1e3 * seconds)
    return found


def _admitted(case: Case, bench: SamplingBench) -> tuple[RequestState, jax.Array]:
    """The request state with such a request in every slot but the null slot; and the step's feature bits."""
    max_model_len = bench.context + 1
    spec = StepSpec(
        block_size=max_model_len,
        max_model_len=max_model_len,
        num_blocks_per_row=1,
        groups=group_layers((None,), max_model_len),
        num_slots=bench.rows + 1,
        vocab_size=bench.vocab_size,
        hidden_size=1,
        dtype=jnp.bfloat16,
        decode_steps=1,
        num_top_logprobs=NUM_TOP,
        logprobs_mode=MODE,
        num_scored=1,
        processors=case.processors,
    )
    layout, state = admission_layout(spec), allocate_request_state(spec)
    admit = jax.jit(make_admit(layout), donate_argnums=0)
    rng, features = random.Random(0), []
    for slot in range(1, bench.rows + 1):
        # No token starts a reasoning block, so the history is searched to its beginning.
        token_ids = [9 + token_id for token_id in random_prompt(rng, bench.context, 1000)]
        prompt = token_ids[: bench.context // 2]
        options: dict[str, Any] = {"temperature": 0} | case.options
        params = SamplingParams(**options)
        request = Request(
            request_id="", prompt_token_ids=prompt, params=params, seed=slot, **case.own
        )
        features.append(features_of(request, case.processors))
        admission = Admission(
            slot=slot,
            sequence_index=0,
            token_ids=token_ids,
            block_tables=[[]],
            prompt_len=len(prompt),
            max_len=max_model_len,
            fields=slot_fields_of(request, bench.vocab_size, case.processors),
        )
        state = admit(state, jnp.asarray(pack_admission(admission, layout)))
    return state, jnp.int32(reduce(or_, features))


def _masks(bench: SamplingBench) -> dict[str, list[float]]:
    """Random walks through grammars: microseconds to accept a token and compute the mask of the next."""
    from jaxpage.structured_outputs.compiler import GrammarCompiler
    from jaxpage.structured_outputs.config import StructuredOutputsConfig
    from jaxpage.structured_outputs.masks import GrammarMasks

    tokenizer = make_tokenizer(bench.vocab_size)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(
        tokenizer,
        vocab_size=bench.vocab_size,
        eos_token_ids=(eos,),
        config=StructuredOutputsConfig(),
    )
    found: dict[str, list[float]] = {}
    for name, params in GRAMMARS.items():
        grammar = compiler.compile(params)
        grammar.matcher.result()
        source = GrammarMasks(compiler, grammar, forces=False)
        rng, found[name], index, output = random.Random(0), [], 0, []
        while len(found[name]) < bench.masks:
            start = time.perf_counter()
            mask = source.mask(index, output)
            found[name].append(1e6 * (time.perf_counter() - start))
            assert mask is not None, source.error(index)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            output.append(int(rng.choice(allowed)))
            if output[-1] == eos:  # the next walk
                index, output = index + 1, []
    return found


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE with `vocab_size` made-up tokens: most resemble words and word pieces, the others are any bytes.

    The cost of a mask depends on the tokens; those of a real vocabulary share more prefixes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*"etaoinshrdlu" * 4, *"cmwfgypbvkjxqz" * 2, *"ETAOINSHR", *"Ġ" * 20]  # Ġ: space
    rest = [*"0123456789" * 2, *"\".,:;-_()[]{}'/=<>", *alphabet]
    ids = {token: number for number, token in enumerate(["<eos>", *alphabet])}
    merges = []
    while len(ids) < vocab_size:
        pieces = letters if rng.random() < 0.85 else rest
        pair = rng.choice(pieces), rng.choice(pieces)
        token = "".join(pair)
        if token not in ids and len(token) <= 12 and "Ġ" not in pair[1]:
            ids[token] = len(ids)
            merges.append(pair)
            pieces.append(token)
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def show(report: dict[str, Any]) -> str:
    """Medians, their excess over the plain step and shares of the floor. Then median and 99th percentile of masks."""
    bandwidth, device = report["bandwidth"], report["device"]
    floor = 1e3 * WEIGHT_BYTES / bandwidth
    medians = {name: statistics.median(times) for name, times in report["milliseconds"].items()}
    rows = [["", "ms", "more than greedy, ms", "of the floor"]]
    for name, median in medians.items():
        more = "" if name == BASELINE else f"{median - medians[BASELINE]:.2f}"
        rows.append([name, f"{median:.2f}", more, f"{100 * median / floor:.1f} %"])
    masks = [["mask for a", "us: median", "p99"]]
    for name, times in report["microseconds"].items():
        masks.append([name, f"{statistics.median(times):.0f}", f"{np.percentile(times, 99):.0f}"])
    return "\n".join(
        [
            f"{report['rows']} rows, vocabulary {report['vocab_size']:,}, context {report['context']}; {device}",
            f"floor: {WEIGHT_BYTES / 1e9:.2f} GB of weights at {bandwidth / 1e9:.1f} GB/s, {floor:.1f} ms",
            "",
            results.table(rows),
            "",
            results.table(masks),
        ]
    )
