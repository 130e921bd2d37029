"""`jaxpage bench lora`: throughput of a batch whose rows have adapters, interleaved with an engine without adapters.

Both engines are in this process, have the same model and answer the same requests.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxpage.bench import results
from jaxpage.bench.engines import Work, run_llm
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import Shape, checkpoint, engine_options, machine
from jaxpage.bench.workloads import equal_requests, run_interleaved
from jaxpage.weights.safetensors import open_checkpoint

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WITHOUT, _WITH = "no adapters", "adapters"


@dataclass(frozen=True, kw_only=True)
class LoraBench:
    """Time batches with adapters on every linear layer, and the same batches without."""

    num_adapters: int = 8  # assigned to the rows round-robin
    rank: int = 16
    batch_size: int = 32
    input_len: int = 32  # tokens of each prompt
    output_len: int = 64  # tokens of each answer
    rounds: int = 5  # counted rounds, after an uncounted one
    shape: Shape = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    options: str = "{}"  # further options of `LLM`, as JSON
    seed: int = 0
    json: Path | None = None  # all times go to this file


def main(bench: LoraBench) -> None:
    """Measure, print medians, and write all times to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: LoraBench) -> dict[str, Any]:
    """Output tokens per second of both engines, and seconds of each round. Raises ValueError for bad sizes."""
    check_least(bench, num_adapters=1, rank=1, batch_size=1, input_len=1, output_len=1, rounds=1)
    folder, config = checkpoint(bench.shape, bench.model)
    from jaxpage import LLM, LoRARequest, SamplingParams

    options = {
        "max_model_len": bench.input_len + bench.output_len,
        "max_num_seqs": bench.batch_size,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    } | engine_options(bench.options)
    adapted = {"enable_lora": True, "max_loras": bench.num_adapters, "max_lora_rank": bench.rank}
    with tempfile.TemporaryDirectory() as temporary:
        llms = {
            _WITHOUT: LLM(str(folder), **options),
            _WITH: LLM(str(folder), **options, **adapted),
        }
        requests = []
        for number in range(1, bench.num_adapters + 1):
            path = save_adapter(Path(temporary) / str(number), folder, bench.rank, seed=number)
            requests.append(LoRARequest(f"adapter {number}", number, str(path)))
            llms[_WITH].add_lora(requests[-1])
    rows = [requests[i % bench.num_adapters] for i in range(bench.batch_size)]
    given = {_WITHOUT: None, _WITH: rows}

    def runner(name: str) -> Any:
        llm, adapters = llms[name], given[name]
        llm.wait_until_warm()
        return lambda work: run_llm(llm, SamplingParams, work, lora_request=adapters)[0]

    rng = random.Random(bench.seed)
    shape = bench.batch_size, bench.input_len, bench.output_len, config["vocab_size"]
    works: list[list[Work]] = [[equal_requests(rng, *shape)] for _ in range(bench.rounds + 1)]
    taken = run_interleaved({name: runner(name) for name in llms}, works)
    seconds = {name: [round_[0] for round_ in rounds] for name, rounds in taken.items()}
    num_tokens = works[0][0].num_output_tokens
    rates = {name: num_tokens / statistics.median(s) for name, s in seconds.items()}
    return {
        "seconds": seconds,
        "tokens_per_second": rates,
        "ratio": rates[_WITH] / rates[_WITHOUT],
        "model": str(folder),
        "options": options | adapted,
        "machine": machine(),
    }


def show(report: dict[str, Any]) -> str:
    """A line for each engine, and the ratio of their throughputs."""
    rows = [("", "output tokens/s", "seconds")]
    for name, rate in report["tokens_per_second"].items():
        median = statistics.median(report["seconds"][name])
        rows.append((name, f"{rate:.1f}", f"{median:.2f}"))
    return f"{results.table(rows)}\nwith adapters: {report['ratio']:.2f} of the throughput without"


def save_adapter(path: Path, model: Path, rank: int, *, seed: int) -> Path:
    """A PEFT folder with small random A and B for every linear layer of a checkpoint's attention and MLP."""
    rng = np.random.default_rng(seed)
    halves = {}
    for name, tensor in open_checkpoint(model).items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.rpartition(".")[2] in _TARGETS:
            num_out, num_in = tensor.shape
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                value = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                halves[f"base_model.model.{layer}.lora_{half}.weight"] = value
    path.mkdir(parents=True)
    save_file(halves, path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": _TARGETS}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path
