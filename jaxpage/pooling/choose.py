"""Which models pool and which generate, according to their options and their folder.

Knows config.json and `modules.json`. Must not build anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.hub import is_url
from jaxpage.models import pooling_registry
from jaxpage.models.pooling_registry import Architecture
from jaxpage.pooling.sentence_transformers import has_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def pools(options: EngineConfig) -> bool:
    """Whether a model is run for vectors instead of text.

    With `runner="auto"`: if its architecture pools, if it is to be converted, or if its folder is a
    sentence-transformers folder. False for a model that cannot be read: building the engine reports the error.
    """
    if options.runner != "auto":
        return options.runner == "pooling"
    if options.convert in ("embed", "classify"):
        return True
    if is_url(options.model):
        return False
    try:
        options = options.with_local_files(weights=False)
        found = pooling_registry.architecture(_hf_config(options))
    except ValueError:
        return False
    folder = Path(options.model)
    return found is not None and (not found.generates or folder.is_dir() and has_modules(folder))


def read_architecture(options: EngineConfig) -> tuple[PretrainedConfig, Architecture]:
    """config.json, and the task of its model. Raises ValueError."""
    hf_config = _hf_config(options)
    found = pooling_registry.architecture(hf_config)
    if found is None:
        name = (hf_config.architectures or [f"none (model_type {hf_config.model_type!r})"])[0]
        raise ValueError(
            f"architecture {name} is not supported for pooling; supported are {pooling_registry.supported()}"
        )
    if options.convert == "none" and found.generates:
        raise ValueError(
            f'{found.name} generates text; convert="embed" or "classify" makes it pool, or leave convert "auto"'
        )
    if options.convert == "classify":
        return hf_config, Architecture(found.name, found.family, "classify", found.is_encoder)
    if options.convert == "embed":
        return hf_config, Architecture(found.name, found.family, "embed", found.is_encoder)
    return hf_config, found


def _hf_config(options: EngineConfig) -> PretrainedConfig:
    return load_hf_config(options.hf_config_path or options.model, options.hf_overrides)
