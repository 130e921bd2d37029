"""A trained model as a Hugging Face folder, in bfloat16, for transformers and jaxpage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxpage import tiny
from jaxpage.demo.network import HF_CONFIG, Params, model_config
from jaxpage.models.config import ModelConfig


def write(folder: Path, params: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write the model to `folder`, completely or not at all. `params` are arrays by path.

    Raises FileExistsError if the folder exists.
    """

    def write_more(draft: Path) -> None:
        tiny.write_tokenizer(draft, tokenizer)
        (draft / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE, encoding="utf-8")

    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name another folder or remove it")
    special = {"eos_token_id": tiny.IM_END, "pad_token_id": tiny.END_OF_TEXT}
    ends = {key: tokenizer.token_to_id(token) for key, token in special.items()}
    config = HF_CONFIG | {"vocab_size": tokenizer.get_vocab_size()} | ends
    tensors = {path: np.asarray(p).astype(ml_dtypes.bfloat16) for path, p in params.items()}
    tiny.write_checkpoint(folder, config, tensors=tensors, write_more=write_more)


def read(folder: Path) -> tuple[Params, ModelConfig, Tokenizer]:
    """What `write` wrote: bfloat16 parameters by path, their config, the tokenizer."""
    params = {path: jnp.asarray(p) for path, p in load_file(folder / "model.safetensors").items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return params, model_config(tokenizer.get_vocab_size(), jnp.bfloat16), tokenizer
