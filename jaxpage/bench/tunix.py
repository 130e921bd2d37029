"""`jaxpage bench tunix`: Tunix's own sampler and jaxpage's, interleaved, on one live Tunix module (extra `tunix`).

Both answer the same groups through Tunix's interface for rollout engines, and are compared with Tunix's trainer.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage import SamplingParams
from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import machine
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.rl import Sampler
from jaxpage.rl.binding import Binding

_VANILLA, _JAXPAGE = "Tunix's sampler", "jaxpage"
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 8, 4, 32, 16
_EOS, _COMPARED = 2, 64  # the tokenizer's EOS; how many rows are compared with the trainer


@dataclass(frozen=True, kw_only=True)
class TunixBench:
    """Time rollouts of groups whose answers end at random, in float32."""

    groups: tuple[int, ...] = (8, 32)  # prompts per batch
    group_size: int = 8
    input_len: int = 64
    output_len: int = 256  # of the longest answers
    mean_len: int = 96  # approximate; determines how many stop tokens there are
    layers: int = 4
    width: int = 256
    vocab: int = 4096
    rounds: int = 3  # counted rounds, after an uncounted one
    json: Path | None = None  # all figures go to this file


class _Ids:
    """A tokenizer for texts that consist of ids."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(each) for each in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return _EOS

    def pad_id(self) -> int:
        return 0


def main(bench: TunixBench) -> None:
    """Measure, print a table, and write all figures to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: TunixBench) -> dict[str, Any]:
    """For each size and engine: rates, seconds, update times, KV bytes, and differences from the trainer."""
    check_least(bench, groups=1, group_size=1, input_len=1, mean_len=1, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        _write_config(bench, folder)
        actor = _actor(bench)
        sizes = [_measure_size(bench, actor, folder, groups) for groups in bench.groups]
        strict = _strict(bench, actor, folder)
    return {"sizes": sizes, "strict": strict, "machine": machine()}


def show(report: dict[str, Any]) -> str:
    """A line for each size and engine, and the strict sampler's mismatches."""
    heads = ("", "tokens/s", "tokens", "off by a bit", "max off", "update ms", "KV MB")
    rows: list[tuple[str, ...]] = [heads]
    for size in report["sizes"]:
        for name, found in size["engines"].items():
            label = f"{size['groups']}x{size['group_size']} {name}"
            rows.append(
                (
                    label,
                    f"{found['rate']:.0f}",
                    str(found["tokens"]),
                    f"{100 * found['mismatched']:.0f} %",
                    f"{found['max_abs']:.1e}",
                    f"{found['update_ms']:.2f}",
                    f"{found['kv_bytes'] / 1e6:.0f}",
                )
            )
        rows.append(
            (f"{size['groups']}x{size['group_size']} ratio", f"{size['ratio']:.2f}", *[""] * 5)
        )
    strict = report["strict"]
    return (
        f"{results.table(rows)}\nstrict, the same parameters in jaxpage's own module: "
        f"{strict['mismatches']} of {strict['tokens']} logprobs differ from the trainer's"
    )


def _measure_size(bench: TunixBench, actor: nnx.Module, folder: str, groups: int) -> dict[str, Any]:
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

    rng = random.Random(groups)
    stops = [_EOS, *rng.sample(range(3, bench.vocab), max(0, bench.vocab // bench.mean_len - 1))]
    engines = _engines(bench, actor, folder, groups)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, list[Any]] = {name: [] for name in engines}
    for number in range(bench.rounds + 1):
        config = base_rollout.RolloutConfig(
            max_tokens_to_generate=bench.output_len,
            max_prompt_length=bench.input_len,
            temperature=1.0,
            top_p=1.0,  # with None Tunix's sampler would be greedy
            seed=number,  # pyright: ignore[reportArgumentType]
            eos_tokens=stops,
            return_logprobs=True,
        )
        prompts = _prompts(bench, rng, groups)
        for name, (rollout, _) in engines.items():
            start = time.perf_counter()
            output = rollout.generate(prompts, config)
            if number:
                taken[name].append(time.perf_counter() - start)
                outputs[name].append(output)
    found = {}
    for name, (rollout, kv_bytes) in engines.items():
        lengths = [_num_tokens(bench, name, output) for output in outputs[name]]
        rates = [n / s for n, s in zip(lengths, taken[name], strict=True)]
        found[name] = {
            "rate": statistics.median(rates),
            "seconds": taken[name],
            "tokens": int(statistics.median(lengths)),
            "update_ms": _update_ms(rollout, actor),
            "kv_bytes": kv_bytes,
        } | _differences(bench, actor, outputs[name][-1])
    engines[_JAXPAGE][0].sampler.shutdown()
    ratio = found[_JAXPAGE]["rate"] / found[_VANILLA]["rate"]
    return {"groups": groups, "group_size": bench.group_size, "engines": found, "ratio": ratio}


def _engines(bench: TunixBench, actor: Any, folder: str, groups: int) -> dict[str, Any]:
    """By name: a rollout engine, and the bytes of its KV."""
    from tunix.generate.tokenizer_adapter import (  # pyright: ignore[reportMissingImports]
        TokenizerAdapter,
    )
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout.vanilla_rollout import (  # pyright: ignore[reportMissingImports]
        VanillaRollout,
    )

    from jaxpage.rl.tunix import JaxpageRollout

    rows, length = groups * bench.group_size, bench.input_len + bench.output_len
    token_bytes = bench.layers * 2 * _KV_HEADS * _HEAD_DIM * 4
    # Prompts once, and answers of twice the mean length; requests that do not fit wait.
    num_tokens = groups * bench.input_len + rows * min(bench.output_len, 2 * bench.mean_len)
    num_blocks = num_tokens // _BLOCK + rows
    cache = base_rollout.CacheConfig(length, bench.layers, _KV_HEADS, _HEAD_DIM)
    jaxpage = JaxpageRollout(
        model=folder,
        rollout_actor=actor,
        tokenizer=_Ids(),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=bench.output_len, max_prompt_length=bench.input_len
        ),
        max_num_seqs=rows,
        block_size=_BLOCK,
        num_gpu_blocks_override=num_blocks,
    )
    jaxpage.sampler.wait_until_warm()
    vanilla = VanillaRollout(actor, TokenizerAdapter(_Ids()), cache)
    return {
        _VANILLA: (vanilla, rows * length * token_bytes),
        _JAXPAGE: (jaxpage, num_blocks * _BLOCK * token_bytes),
    }


def _differences(bench: TunixBench, actor: nnx.Module, output: Any) -> dict[str, float]:
    """Differences of the returned logprobs from those of Tunix's trainer.

    Rows with a sampled pad id are left out, because the trainer treats it as padding.
    """
    from tunix.rl import common  # pyright: ignore[reportMissingImports]

    rows = [i for i, tokens in enumerate(output.tokens) if len(tokens) and 0 not in tokens]
    rows = rows[:_COMPARED]
    completions = np.zeros((len(rows), bench.output_len), np.int32)
    for row, i in zip(completions, rows, strict=True):
        row[: len(output.tokens[i])] = output.tokens[i]
    graphdef, state = nnx.split(actor)
    expected = np.asarray(
        common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=jnp.asarray(np.asarray(output.left_padded_prompt_tokens)[rows]),
            completion_tokens=jnp.asarray(completions),
            pad_id=0,
            eos_id=_EOS,
        )
    )
    ours = np.concatenate([np.asarray(output.logprobs[i], np.float32) for i in rows])
    theirs = np.concatenate(
        [row[: len(output.tokens[i])] for row, i in zip(expected, rows, strict=True)]
    )
    return {
        "mismatched": float((ours != theirs).mean()),
        "max_abs": float(np.abs(ours - theirs).max()),
    }


def _strict(bench: TunixBench, actor: nnx.Module, folder: str) -> dict[str, int]:
    """The same parameters in a module of jaxpage, with strict numerics: how many logprobs differ from the trainer's."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "max_model_len": bench.input_len + bench.output_len + 1,
    }
    config = EngineConfig.from_options(model=folder, dtype="float32", **options)
    spec = make_engine_spec(config, device=jax.local_devices()[0])
    spec.transform_weights(join=False)
    binding = Binding(actor)
    binding.prepare(spec)
    binding.refresh()
    strict = Sampler(binding.model_of().ours(), folder, numerics="strict", **options)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, bench.vocab) for _ in range(bench.input_len)] for _ in range(2)]
    params = SamplingParams(max_tokens=bench.output_len, temperature=1.0, ignore_eos=True)
    report = strict.check_parity(strict.generate(prompts, params, n=8, seed=0))
    strict.shutdown()
    return {"tokens": report.token_count, "mismatches": report.mismatch_count}


def _update_ms(rollout: Any, actor: nnx.Module) -> float:
    """Median time of `update_params` with new arrays on the same devices as the old ones."""
    times = []
    for factor in (2.0, 0.5) * 5:
        for _, variable in nnx.to_flat_state(nnx.state(actor, nnx.Param)):
            variable.set_value(variable.get_value() * factor)
        params = nnx.state(actor, nnx.Param)
        jax.block_until_ready(params)
        start = time.perf_counter()
        rollout.update_params(params)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _num_tokens(bench: TunixBench, name: str, output: Any) -> int:
    """Sampled tokens, including stop tokens, which Tunix's sampler does not return."""
    lengths = [len(tokens) for tokens in output.tokens]
    return sum(n + (name == _VANILLA and n < bench.output_len) for n in lengths)


def _prompts(bench: TunixBench, rng: random.Random, groups: int) -> list[str]:
    prompts = [rng.choices(range(3, bench.vocab), k=bench.input_len - 1) for _ in range(groups)]
    return [" ".join(map(str, ids)) for ids in prompts for _ in range(bench.group_size)]


def _write_config(bench: TunixBench, folder: str) -> None:
    import transformers

    transformers.Qwen3Config(
        vocab_size=bench.vocab,
        hidden_size=bench.width,
        intermediate_size=3 * bench.width,
        num_hidden_layers=bench.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)


def _actor(bench: TunixBench) -> Any:
    from tunix.models.qwen3.model import ModelConfig, Qwen3  # pyright: ignore[reportMissingImports]

    config = ModelConfig(
        num_layers=bench.layers,
        vocab_size=bench.vocab,
        embed_dim=bench.width,
        hidden_dim=3 * bench.width,
        num_heads=_HEADS,
        head_dim=_HEAD_DIM,
        num_kv_heads=_KV_HEADS,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return Qwen3(config, rngs=nnx.Rngs(0))
