"""`PoolingParams` and `PoolerConfig`: how a request and an engine are pooled, under vLLM's names.

Knows names and ranges. Must not know models.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from dataclasses import dataclass, field
from typing import Any

from jaxpage.sampling_params import RequestOutputKind

TASKS = ("embed", "classify", "token_embed", "token_classify")
# Names that are not tasks -> what to use instead.
_HINTS = {
    "score": 'call LLM.score, or use "classify" or "embed"',
    "reward": 'call LLM.reward, or use "token_classify"',
    "encode": f"give one of {', '.join(TASKS)}",
}
_SEQUENCE_TYPES = ("CLS", "LAST", "MEAN")
_TOKEN_TYPES = ("ALL", "STEP")


@dataclass(kw_only=True)
class PoolingParams:
    """How one text is pooled. Raises ValueError for bad values."""

    # longer texts are truncated to this many tokens; -1: to max_model_len
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None  # return only the first ones of an embedding (Matryoshka)
    # None: unit length for embeddings, probabilities for classes; False: raw numbers
    use_activation: bool | None = None
    # for process rewards: the token that ends a step; None: the model's
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None  # for process rewards: which labels are returned
    task: str | None = None  # one of TASKS
    skip_reading_prefix_cache: bool | None = None  # no effect: there is no prefix cache
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        check_task(self.task)
        _check_ints(self, ("truncate_prompt_tokens", "dimensions", "step_tag_id"))
        _check_labels(self.returned_token_ids)
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")
        length = self.truncate_prompt_tokens
        if length is not None and length < 1 and length != -1:
            raise ValueError(f"truncate_prompt_tokens must be at least 1, or -1, got {length}")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ValueError(f"use_activation must be a bool or None, got {self.use_activation!r}")
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            raise ValueError("output_kind must be FINAL_ONLY: pooling has a single output")

    def clone(self) -> PoolingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How an engine pools, where that differs from the checkpoint. Raises ValueError for bad values."""

    # CLS, LAST or MEAN for whole texts, ALL or STEP for tokens; None: the checkpoint's
    pooling_type: str | None = None
    seq_pooling_type: str | None = None  # the same, for whole texts only
    tok_pooling_type: str | None = None  # the same, for tokens only
    use_activation: bool | None = None  # the default of `PoolingParams.use_activation`
    normalize: bool | None = None  # an older name of `use_activation`, for embeddings
    dimensions: int | None = None  # the default of `PoolingParams.dimensions`
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        unsupported = {name: value for name, value in self.options.items() if value}
        if unsupported:
            name, value = next(iter(unsupported.items()))
            known = ", ".join(f.name for f in dataclasses.fields(self) if f.name != "options")
            raise ValueError(
                f"pooler_config has {name}={value!r}, which is not supported; supported are {known}"
            )
        _check_type("pooling_type", self.pooling_type, (*_SEQUENCE_TYPES, *_TOKEN_TYPES))
        _check_type("seq_pooling_type", self.seq_pooling_type, _SEQUENCE_TYPES)
        _check_type("tok_pooling_type", self.tok_pooling_type, _TOKEN_TYPES)
        _check_ints(self, ("dimensions", "step_tag_id"))
        _check_labels(self.returned_token_ids)

    @property
    def sequence_pooling(self) -> str | None:
        """The pooling type of whole texts: CLS, LAST or MEAN; None if it was not given."""
        given = self.seq_pooling_type or self.pooling_type
        return given if given in _SEQUENCE_TYPES else None

    @property
    def activates(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation


def to_pooler_config(value: Any) -> PoolerConfig:
    """A PoolerConfig from one, from a dict of its fields, or from None. Raises ValueError."""
    if value is None:
        return PoolerConfig()
    if isinstance(value, PoolerConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"pooler_config must be a PoolerConfig or a dict, got {value!r}")
    known = {f.name for f in dataclasses.fields(PoolerConfig)} - {"options"}
    ours = {name: v for name, v in value.items() if name in known}
    return PoolerConfig(**ours, options={n: v for n, v in value.items() if n not in known})


def check_task(task: str | None) -> None:
    """Raise ValueError for an unknown pooling task."""
    if task is not None and task not in TASKS:
        hint = _HINTS.get(str(task), f"it must be one of {', '.join(TASKS)}")
        raise ValueError(f"task {task!r} is not a pooling task: {hint}")


def _check_type(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check_ints(holder: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(holder, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be an int, got {value!r}")


def _check_labels(labels: Any) -> None:
    if labels is None:
        return
    if not isinstance(labels, list | tuple) or not all(_is_label(label) for label in labels):
        raise ValueError(
            f"returned_token_ids must be a list of ints of at least 0, got {labels!r:.200}"
        )


def _is_label(value: Any) -> bool:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_int and int(value) >= 0
