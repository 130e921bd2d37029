"""The outputs of pooling models: vLLM's types. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(kw_only=True, slots=True)
class PoolingOutput:
    """The task's float32 numbers: [D] for a text, [T, D] for its tokens."""

    data: np.ndarray


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(kw_only=True, slots=True)
class ClassificationOutput:
    """The probability of each class, or its logit if activations are off."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(kw_only=True, slots=True)
class ScoringOutput:
    """How well two texts match: a cross-encoder's probability, or the cosine of their embeddings."""

    score: float


@dataclass(kw_only=True, slots=True)
class PoolingRequestOutput:
    """The output of one prompt. `outputs` is a PoolingOutput; the classes below have other types."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """Returned by `LLM.embed`: `outputs` is an EmbeddingOutput."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput):
    """Returned by `LLM.classify`: `outputs` is a ClassificationOutput."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput):
    """Returned by `LLM.score`: `outputs` is a ScoringOutput."""

    __slots__ = ()
