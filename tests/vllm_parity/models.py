"""The two models, of Llama's shape, in float32, with the demo's tokenizer: one says sentences, the other anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxpage.demo import checkpoint
from tests import checkpoints
from tests.vllm_parity.requests import EOS, OTHER_EOS, VOCAB_SIZE


def demo_model(folder: Path) -> None:
    """The demo's weights. As Qwen2 vLLM would not know their head_dim, but take hidden_size / num_attention_heads."""
    source = checkpoint()
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "dtype": "float32",
    }
    weights = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    for layer in range(config["num_hidden_layers"]):  # Qwen2 has no bias there
        name = f"model.layers.{layer}.self_attn.o_proj.bias"
        weights[name] = torch.zeros(config["hidden_size"])
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    _add_tokenizer(folder, [EOS])


def random_model(folder: Path) -> None:
    """Random weights, and a second EOS that only the generation config knows."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    checkpoints.save(config, folder, seed="vllm_parity")
    _add_tokenizer(folder, [EOS, OTHER_EOS])


def _add_tokenizer(folder: Path, eos_token_ids: list[int]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint() / name, folder)
    ids = {"eos_token_id": eos_token_ids}
    (folder / "generation_config.json").write_text(json.dumps(ids))


# Name -> (what writes it to a folder, what ends its reasoning).
MODELS = {"demo": (demo_model, "."), "random": (random_model, "So.\n")}
