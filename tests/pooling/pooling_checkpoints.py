"""Tiny checkpoints of pooling models, made by transformers and torch, and torch's own answers to them.

Random and seeded, with weights spread wider than transformers' own, so that a mistake anywhere shows.
"""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import transformers

VOCAB_SIZE = 250
_BERT = {
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
}
_WIDE = _BERT | {"num_attention_heads": 2, "hidden_size": 48, "num_hidden_layers": 3}
_DECODER = _BERT | {"num_key_value_heads": 2}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# family -> name of its config class, of its models, and arguments of its configs
FAMILIES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "Bert": (
        "BertConfig",
        [_BERT, _WIDE | {"hidden_act": "gelu_new"}, _BERT | {"type_vocab_size": 4}],
    ),
    "Roberta": ("RobertaConfig", [_BERT, _WIDE, _BERT | {"pad_token_id": 5, "hidden_act": "relu"}]),
    "XLMRoberta": ("XLMRobertaConfig", [_BERT, _WIDE, _BERT | {"layer_norm_eps": 1e-5}]),
    "ModernBert": (
        "ModernBertConfig",
        [
            _BERT | {"num_hidden_layers": 3, "local_attention": 8},
            _WIDE
            | {
                "layer_types": [_SLIDING, _SLIDING, _FULL],
                "local_attention": 16,
                "norm_bias": True,
            },
            _BERT
            | {
                "attention_bias": True,
                "mlp_bias": True,
                "classifier_pooling": "mean",
                "classifier_bias": True,
            },
        ],
    ),
    "Qwen2": (
        "Qwen2Config",
        [_DECODER, _DECODER | {"hidden_size": 64}, _DECODER | {"tie_word_embeddings": True}],
    ),
    "Qwen3": (
        "Qwen3Config",
        [_DECODER, _DECODER | {"head_dim": 16}, _WIDE | {"num_key_value_heads": 1}],
    ),
    "Llama": (
        "LlamaConfig",
        [_DECODER, _DECODER | {"attention_bias": True}, _WIDE | {"num_key_value_heads": 2}],
    ),
    "GPTNeoX": ("GPTNeoXConfig", [_BERT]),
    "GPT2": ("GPT2Config", [_BERT]),
    "Phi": ("PhiConfig", [_DECODER]),
    "Gemma3Text": (
        "Gemma3TextConfig",
        [
            _DECODER
            | {
                "use_bidirectional_attention": True,
                "layer_types": [_SLIDING, _FULL],
                "sliding_window": 8,
            },
            _DECODER
            | {
                "use_bidirectional_attention": True,
                "layer_types": [_FULL, _SLIDING],
                "sliding_window": 13,
            },
            _DECODER | {"layer_types": [_SLIDING, _FULL], "sliding_window": 8},
        ],
    ),
}
CASES = [
    (family, variant)
    for family, (_, variants) in FAMILIES.items()
    for variant in range(len(variants))
]
_HEADS = {
    "Model": "AutoModel",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForCausalLM": "AutoModelForCausalLM",
}


def build(family: str, variant: int, path: Path, *, head: str = "Model", **overrides: Any) -> Path:
    """Write variant `variant` of `family` with a head (float32) to the folder `path`."""
    import torch

    config_name, variants = FAMILIES[family]
    arguments = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 160,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    arguments |= copy.deepcopy(variants[variant]) | overrides
    config = getattr(transformers, config_name)(**arguments)
    torch.manual_seed(zlib.crc32(f"{family} {variant}".encode()))
    model = getattr(transformers, _HEADS[head]).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name.lower() or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" in name:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return Path(path)


def texts(count: int = 5, *, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Ids of texts of different lengths, without special ones."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(1, longest, count).astype(int)
    return [rng.integers(6, VOCAB_SIZE, int(n)).tolist() for n in lengths]


def hidden_states(path: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """float32[T, E] of each: what transformers' model without its head gives, one by one."""
    import torch

    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([p])).last_hidden_state[0].numpy() for p in prompts]


def logits(path: Path, prompts: list[list[int]], *, head: str, **inputs: Any) -> list[np.ndarray]:
    """What transformers' classifier gives: [D] of each text, or [T, D]."""
    import torch

    model = getattr(transformers, _HEADS[head]).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([p]), **inputs).logits[0].numpy() for p in prompts]


def write_tokenizer(folder: Path) -> None:
    """A WordPiece-like tokenizer: one token a word, w5 to w249; and [CLS] ... [SEP] around texts and pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocab = special | {f"w{i}": i for i in range(len(special), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def write_modules(
    folder: Path, *, pooling: str = "mean", normalize: bool = True, **prompts: str
) -> None:
    """Make it a folder of sentence-transformers."""
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken", "max": "max_tokens"}
    config = {f"pooling_mode_{name}": kind == pooling for kind, name in modes.items()}
    write_json(folder / "1_Pooling" / "config.json", config | {"word_embedding_dimension": 32})
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})


def build_bert(folder: Path) -> Path:
    """A small one with a tokenizer and a prompt for queries, as sentence-transformers save it."""
    build("Bert", 0, folder, max_position_embeddings=32)
    write_tokenizer(folder)
    write_modules(folder, query="w9 ")
    return folder


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_batched_tokens": 128,
    "compilation_cache_dir": "off",
}
