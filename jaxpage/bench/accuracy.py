"""`jaxpage bench accuracy`: the effect of a quantised KV pool on answers and on log-probabilities.

Two measurements for each `kv_cache_dtype`: how many questions the demo model answers exactly, and how far the
log-probabilities of random models of several families are from those with an unquantised pool.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpage import LLM, SamplingParams
from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.workloads import random_prompt
from jaxpage.demo import checkpoint, evaluate
from jaxpage.outputs import CompletionOutput, Logprob
from pallas_kernels.kv_write.quantized import FORMATS

KV_DTYPES = ("auto", *FORMATS)
PROMPT_LENS = (32, 64, 128, 256)
NUM_BEST = 20  # ids whose log-probabilities are compared: the most likely ones after each prefix
Prefix = tuple[list[int], dict[int, Logprob]]  # token ids, and the likely next ones
_POOL_BYTES, _VOCAB_SIZE = 2**26, 512

_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    # With the usual 0.02, attention and logits of such a small model would be almost flat and hide every difference.
    "initializer_range": 0.1,
    "eos_token_id": 2,
}
# name -> config.json. Three families that treat keys differently: unchanged, normed, and with sliding windows.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
}


@dataclass(frozen=True, kw_only=True)
class AccuracyBench:
    """Measure what quantised KV pools cost in accuracy."""

    questions: int = 200  # of each suite, to the demo model
    suites: tuple[str, ...] = ("look-up 8", "look-up 16", "json 8")  # kind, and rows of the table
    num_tokens: int = 32  # after each of four prompts, for each random model
    seed: int = 0  # of the questions, the random weights and their prompts
    json: Path | None = None  # all figures go to this file


def main(bench: AccuracyBench) -> None:
    """Measure, print a table, and write all figures to `bench.json` if given."""
    # Otherwise twenty engines would log their configuration.
    logging.getLogger("jaxpage").setLevel(logging.WARNING)
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: AccuracyBench) -> dict[str, Any]:
    """By KV dtype: "accuracy" by suite (0 to 1), "differences" by family. Raises ValueError for bad sizes or suites."""
    check_least(bench, questions=1, num_tokens=1)
    if unknown := set(bench.suites) - set(evaluate.SUITES):
        raise ValueError(f"no suite {sorted(unknown)}; there are {', '.join(evaluate.SUITES)}")
    families = {name: differences(config, bench) for name, config in FAMILIES.items()}
    return {
        "questions": bench.questions,
        "num_prefixes": len(PROMPT_LENS) * bench.num_tokens,
        "results": {
            kv_cache_dtype: {
                "accuracy": accuracy(kv_cache_dtype, bench),
                "differences": {name: found[kv_cache_dtype] for name, found in families.items()},
            }
            for kv_cache_dtype in KV_DTYPES
        },
    }


def _engine(model: str, **options: Any) -> LLM:
    # Eager: compile only the programs that are used.
    return LLM(model, kv_cache_memory_bytes=_POOL_BYTES, enforce_eager=True, **options)


def accuracy(kv_cache_dtype: str, bench: AccuracyBench) -> dict[str, float]:
    """Share of each suite's questions that the demo model answers exactly."""
    options = {"max_model_len": 1024, "max_num_seqs": 32}
    llm = _engine(str(checkpoint()), kv_cache_dtype=kv_cache_dtype, **options)
    return {
        suite: evaluate.answered(llm, suite, questions=bench.questions, seed=bench.seed)
        for suite in bench.suites
    }


def differences(config: dict[str, Any], bench: AccuracyBench) -> dict[str, dict[str, float]]:
    """By KV dtype: "max" and "mean" of |logprob - the unquantised pool's|, for a random float32 model.

    The engine with the unquantised pool continues random prompts greedily. After each prefix, each engine computes the
    logprobs of the ids that are most likely with the unquantised pool, so all engines see the same prefixes.
    """
    rng = random.Random(bench.seed)
    prompts = [random_prompt(rng, length, _VOCAB_SIZE) for length in PROMPT_LENS]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_SIZES | config))
        asked: list[Prefix] = []
        for kv_cache_dtype in KV_DTYPES:
            llm = _engine(
                folder,
                load_format="dummy",
                seed=bench.seed,
                dtype="float32",
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=max(PROMPT_LENS) + bench.num_tokens + 1,
                max_num_seqs=16,
                max_logprobs=-1,
                skip_tokenizer_init=True,
            )
            asked = asked or prefixes(llm, prompts, bench.num_tokens)
            found[kv_cache_dtype] = distances(llm, asked)
    return found


def prefixes(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[Prefix]:
    """The prompts with each beginning of their greedy continuations, and what is likely after each."""
    return [
        ([*prompt, *completion.token_ids[:index]], logprobs)
        for prompt, completion in zip(
            prompts, greedy(llm, prompts, num_tokens, NUM_BEST), strict=True
        )
        for index, logprobs in enumerate(completion.logprobs or ())
    ]


def distances(llm: LLM, asked: list[Prefix]) -> dict[str, float]:
    """How far an engine's logprobs are from those after the prefixes."""
    completions = greedy(llm, [prefix for prefix, _ in asked], 1, -1)
    found = [
        abs(logprobs[token_id].logprob - wanted.logprob)
        for completion, (_, likely) in zip(completions, asked, strict=True)
        for logprobs in completion.logprobs or ()
        for token_id, wanted in likely.items()
    ]
    return {"max": max(found), "mean": statistics.fmean(found)}


def greedy(
    llm: LLM, prompts: list[list[int]], num_tokens: int, num_best: int
) -> list[CompletionOutput]:
    """The greedy continuation of each prompt, with the logprobs of the `num_best` ids (-1: all) at each token."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, logprobs=num_best, ignore_eos=True, detokenize=False
    )
    return [x.outputs[0] for x in llm.generate(list(prompts), params, use_tqdm=False)]


def show(report: dict[str, Any]) -> str:
    """Everything that is printed."""
    some = report["results"]["auto"]
    rows = [["KV dtype", *some["accuracy"], *some["differences"]]]
    for kv_cache_dtype, found in report["results"].items():
        shares = [f"{100 * share:.1f}" for share in found["accuracy"].values()]
        largest = [f"{values['max']:.4f}" for values in found["differences"].values()]
        rows.append([kv_cache_dtype, *shares, *largest])
    return (
        "demo model: exact answers, %, of "
        f"{report['questions']} questions each\nrandom models in float32: largest |logprob - the "
        f"unquantised pool's| of the {NUM_BEST} most likely\nids after each of "
        f"{report['num_prefixes']} prefixes\n\n{results.table(rows)}"
    )
