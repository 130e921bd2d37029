"""Checkpoints made on the spot: a tiny complete one, and random weights of any Qwen2 shape.

Knows the files of a Hugging Face checkpoint folder and the tensor names of Qwen2. Needs neither
torch, nor jax, nor a network, and knows nothing of the engine. `python -m jaxpage.tiny FOLDER`
builds the tiny one and prints the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2

# Qwen2's own: transformers' Qwen2Tokenizer splits this way, whatever tokenizer.json says.
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a small house at the edge of a large forest.",
    "A request is one prompt being answered, and a step is one launch of the program.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "To be, or not to be, that is the question.",
    "Every block holds the keys and the values of sixteen tokens.",
    "What is the answer to the question that nobody has asked?",
    "She said that she would come back before the end of the day.",
    "Write a short story about a robot who learns to paint.",
    "Please explain in simple words how a bicycle stays upright.",
    "There are three things that we have to do: read, think, and write.",
    "You are a helpful assistant.",
    "The weather was cold, so they stayed inside and talked about the war.",
    "If the pool is full, then the last request has to wait.",
    "In 1969 two people walked on the moon; 12 have done so until today.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n    print(i)\n",
    "{'name': 'value', 'number': 123, 'list': [1, 2, 3], 'flag': true}",
    "Les enfants jouent dans le jardin, près de la maison.",
    "Der Zug fährt um acht Uhr vom Bahnhof ab.",
    "El perro está durmiendo bajo la mesa.",
    "今天天气很好，我们去公园吧。",
    "Water boils at 100 degrees, unless you are on the top of a mountain.",
    "He thought about it for a while, then he wrote down the first line.",
    "The train was late again, which did not surprise anybody.",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "Reading is to the mind what exercise is to the body.",
    "It was a bright cold day in the middle of the winter.",
    "With great care, they carried the painting up the stairs.",
)

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


def build(path: str | os.PathLike[str]) -> Path:
    """Write the tiny checkpoint to `path`: two layers, 512 tokens, the same weights on each call.

    A folder that holds it already is left as it is. Raises ValueError if it holds anything else.
    """
    return write_checkpoint(path, TINY_CONFIG, write_more=_write_tokenizer)


def write_checkpoint(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    *,
    seed: int = 0,
    tensors: Mapping[str, np.ndarray] | None = None,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write a checkpoint of `tensors` to `path`, all of it or nothing; without, of Qwen2's with seeded random bfloat16.

    `config` is the content of config.json; `write_more` may add files to the folder before it
    appears under its name. Raises ValueError if `path` holds something else than this checkpoint.
    """
    path = Path(path)
    if _holds(path, config):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        if tensors is None:
            tensors = dict(_random_tensors(config, np.random.default_rng(seed)))
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        _write_json(folder / "config.json", config)
        special = {k: config[k] for k in ("eos_token_id", "pad_token_id") if k in config}
        _write_json(folder / "generation_config.json", special)
        write_more(folder)
        folder.chmod(0o755)  # mkdtemp made it private, and save_file its file
        (folder / "model.safetensors").chmod(0o644)
        os.rename(folder, path)
    except OSError:
        if not _holds(path, config):  # else another process was faster
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _holds(path: Path, config: dict[str, Any]) -> bool:
    """Whether `path` is this checkpoint; False if there is nothing yet."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    stored = path / "config.json"
    if stored.is_file() and json.loads(stored.read_text()) == config:
        return True
    raise ValueError(f"{path} holds something else than this checkpoint; name another folder")


def _random_tensors(
    config: dict[str, Any], rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bfloat16 array of each parameter; activations and logits get a spread of 1 to 2.

    The usual 0.02 would make a small model's logits so equal that argmax depends on rounding.
    """
    E, F = config["hidden_size"], config["intermediate_size"]
    V, H, K = config["vocab_size"], config["num_attention_heads"], config["num_key_value_heads"]
    D = E // H

    def normal(*shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(std) + np.float32(mean)
        return values.astype(ml_dtypes.bfloat16)

    yield "model.embed_tokens.weight", normal(V, E, std=2 * E**-0.5)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", normal(E, std=0.1, mean=1.0)
        for name, num_heads in (("q", H), ("k", K), ("v", K)):
            yield f"{prefix}.self_attn.{name}_proj.weight", normal(num_heads * D, E, std=E**-0.5)
            yield f"{prefix}.self_attn.{name}_proj.bias", normal(num_heads * D, std=0.1)
        yield f"{prefix}.self_attn.o_proj.weight", normal(E, H * D, std=(H * D) ** -0.5)
        yield f"{prefix}.post_attention_layernorm.weight", normal(E, std=0.1, mean=1.0)
        yield f"{prefix}.mlp.gate_proj.weight", normal(F, E, std=E**-0.5)
        yield f"{prefix}.mlp.up_proj.weight", normal(F, E, std=E**-0.5)
        yield f"{prefix}.mlp.down_proj.weight", normal(E, F, std=F**-0.5)
    yield "model.norm.weight", normal(E, std=0.1, mean=1.0)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", normal(V, E, std=2 * E**-0.5)


def train_byte_level_bpe(texts: Iterable[str], *, vocab_size: int, min_frequency: int) -> Tokenizer:
    """A byte-level BPE that splits as Qwen2's does: any text can be encoded, and decodes to itself.

    A pair of tokens becomes one while it occurs `min_frequency` times in the texts, up to `vocab_size` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokenizer(folder: Path) -> None:
    tokenizer = train_byte_level_bpe(
        SENTENCES, vocab_size=TINY_CONFIG["vocab_size"], min_frequency=1
    )
    write_tokenizer(folder, tokenizer, chat_template=CHAT_TEMPLATE)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **more: str) -> None:
    """tokenizer.json, and tokenizer_config.json with `more` in it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START],
        "model_max_length": TINY_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config | more)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m jaxpage.tiny FOLDER")
    print(build(sys.argv[1]))
