"""The option `speculative_config`: tokens are guessed, and the model checks several guesses in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.eagle_config import method_of_head
from jaxpage.hub import local_folder

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
_NGRAM = ("ngram", "[ngram]")  # vLLM's names of prompt lookup, as a method and as a model
# vLLM's older names of "mtp", for the families that jaxpage has.
_MTP = (
    *("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "ernie_mtp"),
    *("nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp"),
)
_LONGEST_LOOKUP = 5  # vLLM's default
_MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The fields are vLLM's. Raises ValueError for invalid values.

    Method "ngram" is prompt lookup: where the last tokens of a sequence occur earlier in it, the tokens that followed
    them there are the guess (https://github.com/apoorvumang/prompt-lookup-decoding). It takes the longest occurrence of
    `prompt_lookup_min` to `prompt_lookup_max` tokens. If one of the two is not given it is the other, or 5.

    Method "draft_model": a smaller model with the same tokenizer decodes the guess (https://arxiv.org/abs/2211.17192).
    It is the method if `model` is given.

    Method "eagle3": an EAGLE-3 head (https://arxiv.org/abs/2503.01840), trained for the engine's model, guesses from
    hidden states of that model. Method "eagle" is for heads of the first EAGLE (https://arxiv.org/abs/2401.15077). If
    config.json of `model` says that it is a head, the method follows from it, whatever `method` says.

    Method "mtp": the layer for multi-token prediction that the model's own checkpoint has, or that of the same model in
    `model`, guesses from the model's last hidden states. vLLM's older names, such as "deepseek_mtp", mean the same.
    """

    num_speculative_tokens: int  # most tokens that are guessed in a step
    method: str | None = None  # one of METHODS; it becomes "draft_model" with a model, else "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None  # the draft model or head: a folder, or a name on the hub
    revision: str | None = None  # of the draft model or head on the hub
    # accepted as in vLLM, without effect: the draft model is divided over the devices of the model
    draft_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        if self.method in _NGRAM or (self.method is None and self.model in _NGRAM):
            object.__setattr__(self, "method", "ngram")
            if self.model in _NGRAM:
                object.__setattr__(self, "model", None)
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        if self.method in _MTP:
            object.__setattr__(self, "method", "mtp")
        if self.method not in METHODS:
            raise ValueError(
                'method of speculative_config must be "ngram" (prompt lookup), "draft_model", "eagle", "eagle3" or '
                f'"mtp", got {self.method!r}'
            )
        _check_count("num_speculative_tokens", self.num_speculative_tokens)
        if self.method != "ngram":
            self._check_draft_model()
            return
        for name in ("model", "revision", "draft_tensor_parallel_size"):
            if getattr(self, name) is not None:
                raise ValueError(f'{name} of speculative_config is not for method "ngram"')
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        shortest = shortest if shortest is not None else longest
        shortest = shortest if shortest is not None else _LONGEST_LOOKUP
        longest = longest if longest is not None else shortest
        _check_count("prompt_lookup_min", shortest)
        _check_count("prompt_lookup_max", longest)
        if shortest > longest:
            raise ValueError(
                f"prompt_lookup_min={shortest} of speculative_config exceeds prompt_lookup_max={longest}"
            )
        object.__setattr__(self, "prompt_lookup_min", shortest)
        object.__setattr__(self, "prompt_lookup_max", longest)

    def with_local_files(self, **options: Any) -> SpeculativeConfig:
        """The same with a local folder as the draft model, downloaded if necessary, and with the method that it needs.
        options: of `hub.local_folder`. Raises ValueError.
        """
        if self.model is None:
            return self
        options |= {"revision": self.revision}
        folder = local_folder("model of speculative_config", self.model, **options)
        method = method_of_head(folder) or self.method
        return dataclasses.replace(self, model=folder, method=method)

    def _check_draft_model(self) -> None:
        if self.method == "mtp" and self.model is None:
            if self.revision is not None:
                raise ValueError(
                    f"revision={self.revision!r} of speculative_config is of its model, and there is none: give one, "
                    "or leave it out to take the layer of the engine's own checkpoint"
                )
        elif not isinstance(self.model, str) or not self.model:
            raise ValueError(
                f'method "{self.method}" of speculative_config needs a model: a folder, or a name on the hub, '
                f"got {self.model!r}"
            )
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f'{name} of speculative_config is for method "ngram", not "{self.method}"'
                )
        if self.draft_tensor_parallel_size is not None:
            _check_count("draft_tensor_parallel_size", self.draft_tensor_parallel_size)


def to_speculative_config(value: Any) -> SpeculativeConfig | None:
    """The config, from itself or a dict of its fields; None stays None. Raises ValueError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    names = {f.name for f in dataclasses.fields(SpeculativeConfig)}
    if not isinstance(value, Mapping) or "num_speculative_tokens" not in value:
        raise ValueError(
            "speculative_config must be a SpeculativeConfig, or a dict with num_speculative_tokens such as "
            f'{{"method": "ngram", "num_speculative_tokens": 4}}, got {value!r}'
        )
    if unknown := sorted(set(value) - names):
        raise ValueError(
            f"speculative_config has no field {unknown[0]!r}; it has {', '.join(sorted(names))}"
        )
    return SpeculativeConfig(**value)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(
            f"{name} of speculative_config must be an int in 1..{_MOST_TOKENS}, got {value!r}"
        )
