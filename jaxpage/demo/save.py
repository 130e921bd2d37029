"""A trained model as a Hugging Face folder, in bfloat16, which transformers and jaxpage load alike."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jaxpage.demo.network import HF_CONFIG, Params, model_config
from jaxpage.models.config import ModelConfig
from jaxpage.tiny import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START

TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": IM_END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": [IM_START],
    "model_max_length": HF_CONFIG["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
}


def write(folder: Path, params: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write the model to `folder`, all of it or nothing. `params` are arrays by path.

    Raises FileExistsError if the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tensors = {path: np.asarray(p).astype(ml_dtypes.bfloat16) for path, p in params.items()}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(draft / "tokenizer.json"))
        (draft / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        special = {"eos_token_id": IM_END, "pad_token_id": END_OF_TEXT}
        ends = {key: tokenizer.token_to_id(token) for key, token in special.items()}
        files = {
            "config.json": HF_CONFIG | {"vocab_size": tokenizer.get_vocab_size()} | ends,
            "generation_config.json": ends,
            "tokenizer_config.json": TOKENIZER_CONFIG,
        }
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (draft / name).write_text(text, encoding="utf-8")
        draft.chmod(0o755)  # mkdtemp made it private, and save_file its file
        (draft / "model.safetensors").chmod(0o644)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read(folder: Path) -> tuple[Params, ModelConfig, Tokenizer]:
    """What `write` wrote: bfloat16 parameters by path, their config, the tokenizer."""
    params = {path: jnp.asarray(p) for path, p in load_file(folder / "model.safetensors").items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return params, model_config(tokenizer.get_vocab_size(), jnp.bfloat16), tokenizer
