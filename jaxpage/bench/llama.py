"""llama.cpp as a peer, through the C functions of llama-cpp-python, and the GGUF file that it reads.

Runs in the engine's own environment (llama_cpp, gguf, numpy, safetensors, ml_dtypes).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpage.bench.engines import Options, Peer, Work

MAX_BATCH_TOKENS = 2048  # per llama_decode
LOG_ERROR = 4

GGUF_FIELDS = {  # name in the file: name in config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


@dataclass
class Row:
    """A request in one of llama.cpp's sequences."""

    sequence: int
    pending: list[int]  # tokens not computed yet
    num_wanted: int
    num_computed: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCpp(Peer):
    """llama.cpp with simple continuous batching around `llama_decode`, as in its server.

    Greedy tokens are taken with NumPy, which costs a few microseconds per row. With prefix caching, the common prefix
    of all prompts is computed once and copied to their sequences.
    """

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        self.lib = lib = importlib.import_module("llama_cpp")
        self.log = lib.llama_log_callback(_log_error)  # must live as long as the library
        lib.llama_log_set(self.log, None)
        path = gguf_of(Path(folder))
        model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_seq_max = options.max_num_seqs
        params.n_ctx = options.max_num_seqs * options.max_model_len
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = model and lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot run {path}")
        self.memory = lib.llama_get_memory(self.context)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self.options = options
        return {"llama-cpp-python": lib.__version__}

    def run(self, work: Work) -> tuple[float, int]:
        start = time.perf_counter()
        self.lib.llama_memory_clear(self.memory, False)
        waiting = list(zip(work.prompts, work.num_tokens, strict=True))[::-1]
        free = list(range(self.options.max_num_seqs))
        shared = self._share_prefix(work.prompts) if self.options.enable_prefix_caching else 0
        rows: list[Row] = []
        while rows or waiting:
            while free and waiting:
                prompt, wanted = waiting.pop()
                rows.append(Row(free.pop(0), prompt[shared:], wanted, num_computed=shared))
            self._step(rows)
            for row in [r for r in rows if len(r.output) == r.num_wanted]:
                self.lib.llama_memory_seq_rm(self.memory, row.sequence, shared, -1)
                free.append(row.sequence)
                rows.remove(row)
        return time.perf_counter() - start, work.num_output_tokens

    def _share_prefix(self, prompts: list[list[int]]) -> int:
        """Compute the common prefix of all prompts and copy it to every sequence; returns its length, in tokens.

        The last token of each prompt is left out, because its logits are needed.
        """
        prefix = os.path.commonprefix([prompt[:-1] for prompt in prompts])
        if len(prompts) == 1 or not prefix:
            return 0
        row = Row(0, list(prefix), num_wanted=1)
        while not row.output:
            self._step([row])
        for sequence in range(1, min(len(prompts), self.options.max_num_seqs)):
            self.lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        return len(prefix)

    def _step(self, rows: list[Row]) -> None:
        """One `llama_decode` of as many pending tokens as fit; rows that have none left get their next token."""
        batch, num_tokens = self.batch, 0
        sampled: list[Row] = []  # in the order of the logits
        for row in rows:
            taken = row.pending[: MAX_BATCH_TOKENS - num_tokens]
            del row.pending[: len(taken)]
            for token in taken:
                batch.token[num_tokens] = token
                batch.pos[num_tokens] = row.num_computed
                batch.n_seq_id[num_tokens] = 1
                batch.seq_id[num_tokens][0] = row.sequence
                batch.logits[num_tokens] = 0
                row.num_computed += 1
                num_tokens += 1
            if taken and not row.pending:
                batch.logits[num_tokens - 1] = 1
                sampled.append(row)
        batch.n_tokens = num_tokens
        if (status := self.lib.llama_decode(self.context, batch)) != 0:
            raise RuntimeError(f"llama_decode of {num_tokens} tokens returned {status}")
        if sampled:
            self._sample(sampled)

    def _sample(self, rows: list[Row]) -> None:
        np = importlib.import_module("numpy")
        logits = self.lib.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(logits, shape=(len(rows), self.vocab_size))
        for row, token in zip(rows, logits.argmax(axis=1).tolist(), strict=True):
            row.output.append(token)
            row.pending.append(token)


def _log_error(level: int, text: bytes, _: Any) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def gguf_of(folder: Path) -> Path:
    """The GGUF file next to a checkpoint folder, written now unless it exists and is newer."""
    path = folder.parent / f"{folder.name}.bf16.gguf"
    newest = max(file.stat().st_mtime for file in folder.glob("*.safetensors"))
    if not path.exists() or path.stat().st_mtime < newest:
        part = path.with_suffix(f".{os.getpid()}")
        try:
            write_gguf(folder, part)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def write_gguf(folder: Path, path: Path) -> None:
    """Write matrices in bfloat16 and vectors in float32, no tokenizer. Raises ValueError unless Qwen2 in bfloat16."""
    import ml_dtypes  # NumPy has no bfloat16 of its own
    import numpy as np
    from safetensors.numpy import load_file

    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise ValueError(f"only Qwen2 is written as GGUF, and {folder} is {config['model_type']}")
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, "qwen2")
    for field_name, key in GGUF_FIELDS.items():
        getattr(writer, f"add_{field_name}")(config[key])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if tensor.dtype != ml_dtypes.bfloat16:
                raise ValueError(f"{file}: {name} is {tensor.dtype}; only bfloat16 is written")
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if tensor.ndim == 1:
                writer.add_tensor(known, tensor.astype(np.float32))
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(known, tensor.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
