"""A trained model as a Hugging Face folder, in bfloat16, for transformers and jaxpage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxpage import tiny
from jaxpage.demo.pictures import network
from jaxpage.demo.pictures.examples import PROCESSOR
from jaxpage.models.config import ModelConfig

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url', 'image_pil') %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Names of the merger's layers in jaxpage and in checkpoints.
_MERGER = {"visual.merger.inner.": "visual.merger.mlp.0.", "visual.merger.outer.": "visual.merger.mlp.2."}  # fmt: skip


def write(folder: Path, params: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write the model to `folder`, completely or not at all. `params` are arrays by path.

    Raises FileExistsError if the folder exists.
    """

    def write_more(draft: Path) -> None:
        tiny.write_tokenizer(draft, tokenizer)
        (draft / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        settings = json.dumps(PROCESSOR, indent=2) + "\n"
        (draft / "preprocessor_config.json").write_text(settings, encoding="utf-8")

    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name another folder or remove it")
    size = tokenizer.get_vocab_size()
    special = {"eos_token_id": tiny.IM_END, "pad_token_id": tiny.END_OF_TEXT}
    ends = {key: tokenizer.token_to_id(token) for key, token in special.items()}
    text = network.HF_CONFIG["text_config"] | {"vocab_size": size, "bos_token_id": None} | ends
    config = network.HF_CONFIG | {"text_config": text} | network.token_ids(size) | ends
    tensors = {
        _renamed(path, _MERGER): np.asarray(p).astype(ml_dtypes.bfloat16)
        for path, p in params.items()
    }
    tiny.write_checkpoint(folder, config, tensors=tensors, write_more=write_more)


def read(folder: Path) -> tuple[network.Params, ModelConfig, Tokenizer]:
    """What `write` wrote: bfloat16 parameters by path, their config, the tokenizer."""
    ours = {theirs: name for name, theirs in _MERGER.items()}
    stored = load_file(folder / "model.safetensors")
    params = {_renamed(path, ours): jnp.asarray(p) for path, p in stored.items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return params, network.model_config(tokenizer.get_vocab_size(), jnp.bfloat16), tokenizer


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if path.startswith(old):
            return new + path.removeprefix(old)
    return path
