"""Adapters as requests name them, and as the engine gets them: plain values, independent of devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=False)
class LoRARequest:
    """The adapter of a request, with vLLM's names.

    `lora_path` is a PEFT folder. `load_inplace`: reread it even if an adapter with that id is loaded; earlier requests
    keep the old one. Raises ValueError for an id below 1, an empty name or path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a name, got {self.lora_name!r}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"lora_int_id must be a positive int, got {number!r}")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(f"lora_path must be a PEFT folder, got {self.lora_path!r}")

    @property
    def name(self) -> str:
        """vLLM's other name for `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """vLLM's other name for `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """vLLM's other name for `lora_path`."""
        return self.lora_path


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter's weights in host memory, as they are laid out in a slot of the device.

    It never changes: an adapter that is reread becomes a new object.
    """

    request: LoRARequest
    key: str  # a hash of the weights: equal keys mean equal tokens
    arrays: tuple[np.ndarray, ...]  # see `models.lora.AdapterArray`
