"""`jaxpage bench embed`: embeddings of short texts, interleaved with sentence-transformers.

The model has BERT-base's shape and random weights; all engines get the same texts, and tokenising is included. Each
engine has its own process, which is stopped while another one runs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import CACHE, machine
from jaxpage.bench.subprocess_rpc import RemoteObject
from jaxpage.tiny import write_checkpoint

_OURS, _THEIRS = "jaxpage", "sentence-transformers"
_TARGETS = {
    _OURS: "jaxpage.bench.embedders:Jaxpage",
    _THEIRS: "jaxpage.bench.embedders:SentenceTransformers",
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
BERT_BASE: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "dtype": "float32",
}


@dataclass(frozen=True, kw_only=True)
class EmbedBench:
    """Time embeddings of short texts with a model of BERT-base's shape."""

    num_texts: int = 1000
    min_len: int = 8  # tokens of a text, including special ones
    max_len: int = 64
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    # the Python of an environment with sentence-transformers; none: only jaxpage
    python: str | None = None
    rounds: int = 3  # counted rounds, after an uncounted one
    threads: int = 2
    num_layers: int = 12  # fewer for a quick look
    seed: int = 0
    json: Path | None = None  # all times go to this file


def main(bench: EmbedBench) -> None:
    """Measure, print medians, and write all times to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: EmbedBench) -> dict[str, Any]:
    """Seconds of each round by engine and dtype, interleaved. Raises ValueError for bad sizes.

    Includes processor seconds, which remain comparable if something else runs at the same time.
    """
    if not (2 < bench.min_len <= bench.max_len <= BERT_BASE["max_position_embeddings"]):
        raise ValueError(
            f"--min-len and --max-len must be in 3..512, in this order, got {bench.min_len} and {bench.max_len}"
        )
    check_least(bench, num_texts=1, rounds=1, num_layers=1, threads=1)
    folder = checkpoint(bench.num_layers)
    texts = make_texts(bench)
    engines = [_OURS] + ([_THEIRS] if bench.python else [])
    peers: dict[str, RemoteObject] = {}
    versions: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, list[float]] = {}
    try:
        for dtype in bench.dtypes:
            for engine in engines:
                name = f"{engine} {dtype}"
                python = sys.executable if engine == _OURS else bench.python
                peers[name] = RemoteObject(
                    _TARGETS[engine], python=str(python), threads=bench.threads, pause=True
                )
                versions[name] = peers[name].ask("setup", str(folder), dtype)
        last = {name: peer.ask("run", texts)[2] for name, peer in peers.items()}
        for _ in range(bench.rounds):
            for name, peer in peers.items():
                taken, cpu, _last = peer.ask("run", texts)
                seconds.setdefault(name, []).append(taken)
                cpu_seconds.setdefault(name, []).append(cpu)
    finally:
        for peer in peers.values():
            peer.kill()
    reference = np.asarray(next(iter(last.values())))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "texts_per_second": {n: bench.num_texts / statistics.median(s) for n, s in seconds.items()},
        "cosine_of_last": {n: _cosine(reference, np.asarray(v)) for n, v in last.items()},
        "versions": versions,
        "machine": machine(),
    }


def show(report: dict[str, Any]) -> str:
    """A line for each engine and dtype, and the ratio of the best of each engine."""
    rates = report["texts_per_second"]
    rows = [("", "texts/s", "seconds", "processor seconds", "cosine")]
    for name, rate in rates.items():
        median = statistics.median(report["seconds"][name])
        cpu = statistics.median(report["cpu_seconds"][name])
        cosine = report["cosine_of_last"][name]
        rows.append((name, f"{rate:.1f}", f"{median:.2f}", f"{cpu:.2f}", f"{cosine:.4f}"))
    lines = [results.table(rows)]
    ours, theirs = (
        max((rate for name, rate in rates.items() if name.startswith(engine)), default=None)
        for engine in (_OURS, _THEIRS)
    )
    if ours and theirs:
        lines.append(f"best of each: jaxpage is {ours / theirs:.2f} times as fast")
    return "\n".join(lines)


def make_texts(bench: EmbedBench) -> list[str]:
    """Texts of words that are one token each."""
    rng = random.Random(bench.seed)
    lengths = [rng.randint(bench.min_len, bench.max_len) - 2 for _ in range(bench.num_texts)]
    words = range(len(_SPECIAL), BERT_BASE["vocab_size"])
    return [" ".join(f"w{rng.choice(words)}" for _ in range(length)) for length in lengths]


def checkpoint(num_layers: int) -> Path:
    """A sentence-transformers folder with random float32 weights, written once."""
    config = BERT_BASE | {"num_hidden_layers": num_layers}
    path = CACHE.expanduser() / f"bert-{num_layers}"
    if path.is_dir():
        return path
    return write_checkpoint(path, config, tensors=_tensors(config), write_more=_write_more)


def _tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    embed, inner = config["hidden_size"], config["intermediate_size"]

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": np.ones(embed, np.float32),
            f"{name}.bias": np.zeros(embed, np.float32),
        }

    def linear(name: str, out: int, size: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": weight(out, size), f"{name}.bias": np.zeros(out, np.float32)}

    tensors = {
        "embeddings.word_embeddings.weight": weight(config["vocab_size"], embed),
        "embeddings.position_embeddings.weight": weight(config["max_position_embeddings"], embed),
        "embeddings.token_type_embeddings.weight": weight(config["type_vocab_size"], embed),
        **norm("embeddings.LayerNorm"),
        **linear("pooler.dense", embed, embed),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{name}", embed, embed)
        tensors |= linear(f"{layer}.attention.output.dense", embed, embed)
        tensors |= norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", inner, embed)
        tensors |= linear(f"{layer}.output.dense", embed, inner)
        tensors |= norm(f"{layer}.output.LayerNorm")
    return tensors


def _write_more(folder: Path) -> None:
    """Write the tokenizer, and the sentence-transformers modules: a normalised mean."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    num_words = BERT_BASE["vocab_size"]
    vocab = {name: i for i, name in enumerate(_SPECIAL)}
    vocab |= {f"w{i}": i for i in range(len(_SPECIAL), num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=BERT_BASE["max_position_embeddings"],
    ).save_pretrained(folder)
    prefix = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": prefix + kind}
            for i, (path, kind) in enumerate(modules)
        ],
    )
    pooling = {
        "word_embedding_dimension": BERT_BASE["hidden_size"],
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    _write_json(folder / "2_Normalize" / "config.json", {})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512})


def _write_json(file: Path, value: Any) -> None:
    os.makedirs(file.parent, exist_ok=True)
    file.write_text(json.dumps(value, indent=1))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
