"""`Pooler`: turns calls of a pooling model into texts to compute, and the computed numbers into outputs.

Knows tasks, parameters, activations and outputs. Must not know engines, so that `LLM` and the server share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage.pooling.engine import Text
from jaxpage.pooling.inputs import PoolingInputs
from jaxpage.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxpage.pooling.params import PoolerConfig, PoolingParams, check_task
from jaxpage.prompts import Prompt

Activation = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The tasks of a pooling model, and their properties."""

    name: str  # of the architecture
    tasks: tuple[str, ...]  # the first is the default
    size: int  # dimensions of an embedding, or number of classes
    pooler: PoolerConfig
    normalizes: bool  # whether embeddings are normalised by default
    activation: Activation  # for classes
    labels: Mapping[int, str] = field(default_factory=dict)  # names of classes
    # sizes to which embeddings may be truncated; (): any; None: the model was not trained for that
    matryoshka: tuple[int, ...] | None = None
    step_tag_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """A call: the texts to compute, and `finish`, which turns their raw numbers into outputs."""

    texts: list[Text]
    per_token: bool
    finish: Callable[[list[np.ndarray]], list[Any]]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


class Pooler:
    """The calls of one model. Not thread-safe. All raise ValueError for invalid or unsupported arguments."""

    def __init__(self, inputs: PoolingInputs, info: ModelInfo):
        self.inputs, self.info = inputs, info
        self._num_requests = 0

    def encode(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Work:
        """PoolingRequestOutputs of a task, by default the model's own."""
        return self._make_work(prompts, params, task, tokenization_kwargs, _pooling_output)

    def embed(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> Work:
        """EmbeddingRequestOutputs."""
        self._need("embed", "embed")
        return self._make_work(
            prompts, params, "embed", tokenization_kwargs, _embedding, prompt_name
        )

    def classify(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Work:
        """ClassificationRequestOutputs."""
        self._need("classify", "classify")
        return self._make_work(prompts, params, "classify", tokenization_kwargs, _classes)

    def reward(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Work:
        """PoolingRequestOutputs with a reward for each token or step."""
        self._need("token_classify", "reward")
        return self._make_work(
            prompts, params, "token_classify", tokenization_kwargs, _pooling_output
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> Work:
        """ScoringRequestOutputs for 1:1, 1:N or N:N texts.

        A list of `params` has one entry, or one for each computed text: those of `data_1` then `data_2` for an
        embedding model, the pairs for a cross-encoder.
        """
        first, second = _as_list("data_1", data_1), _as_list("data_2", data_2)
        if len(first) > 1 and len(first) != len(second):
            raise ValueError(
                f"data_1 has {len(first)} texts and data_2 {len(second)}; give equally many, or one in data_1"
            )
        if "classify" in self.info.tasks:
            return self._cross_score(first, second, params, tokenization_kwargs, chat_template)
        self._need("embed", "score")
        work = self._make_work(
            first + second, params, "embed", tokenization_kwargs, _pooling_output
        )
        pad = getattr(self.inputs.tokenizer, "pad_token_id", None)

        def finish(results: list[np.ndarray]) -> list[ScoringRequestOutput]:
            outputs = work.finish(results)
            ones, others = outputs[: len(first)], outputs[len(first) :]
            ones = ones * len(others) if len(ones) == 1 else ones
            return [_cosine(one, other, pad) for one, other in zip(ones, others, strict=True)]

        return Work(texts=work.texts, per_token=False, finish=finish)

    def _cross_score(
        self,
        first: list[Any],
        second: list[Any],
        params: PoolingParams | Sequence[PoolingParams] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        chat_template: str | None,
    ) -> Work:
        if self.info.size != 1:
            raise ValueError(
                f"{self.info.name} has {self.info.size} classes; scoring needs a model with one class, or an "
                "embedding model"
            )
        for name, texts in (("data_1", first), ("data_2", second)):
            wrong = [text for text in texts if not isinstance(text, str)]
            if wrong:
                raise ValueError(f"{name} must be texts for a cross-encoder, got {wrong[0]!r}")
        options = _with_truncation(tokenization_kwargs, _to_list(params))
        first = first * len(second) if len(first) == 1 else first
        pairs = self.inputs.pairs(first, second, options, chat_template)
        return self._make_work(pairs, params, "classify", None, _score)

    def _need(self, task: str, verb: str) -> None:
        if task not in self.info.tasks:
            raise ValueError(
                f"{self.info.name} cannot {verb}: its tasks are {' and '.join(self.info.tasks)}"
            )

    def _make_work(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        make: Callable[[str, np.ndarray, list[int]], PoolingRequestOutput],
        prompt_name: str | None = None,
    ) -> Work:
        """Prompts of any form, or parsed ones."""
        check_task(task)
        all_params = _to_list(params)
        task = task or next((p.task for p in all_params if p.task), self.info.tasks[0])
        if task not in self.info.tasks:
            raise ValueError(
                f"{self.info.name} does not have the task {task!r}; it has {', '.join(self.info.tasks)}"
            )
        options = _with_truncation(tokenization_kwargs, all_params)
        parsed = _parsed(prompts) or self.inputs.parse(prompts, options, prompt_name=prompt_name)
        if len(all_params) not in (1, len(parsed)):
            raise ValueError(
                f"pooling_params has {len(all_params)} entries for {len(parsed)} prompts"
            )
        if len(all_params) == 1:
            all_params = [all_params[0]] * len(parsed)
        finishes = [self._finish(each, task) for each in all_params]
        texts = self.inputs.texts(parsed)
        first, self._num_requests = self._num_requests, self._num_requests + len(texts)

        def finish(results: list[np.ndarray]) -> list[PoolingRequestOutput]:
            ids = [list(text.token_ids) for text in texts]
            return [
                make(str(first + i), finishes[i](results[i], ids[i]), ids[i])
                for i in range(len(texts))
            ]

        return Work(texts=texts, per_token=task.startswith("token_"), finish=finish)

    def _finish(
        self, params: PoolingParams, task: str
    ) -> Callable[[np.ndarray, list[int]], np.ndarray]:
        """A function from a text's raw numbers and token ids to its result."""
        info, pooler = self.info, self.info.pooler
        if params.task not in (None, task):
            raise ValueError(
                f"pooling_params.task is {params.task!r}, but the call's task is {task!r}"
            )
        activates = pooler.activates if params.use_activation is None else params.use_activation
        dimensions = params.dimensions or pooler.dimensions
        if task in ("embed", "token_embed"):
            self._check_dimensions(dimensions)
            normalizes = info.normalizes if activates is None else activates
            return lambda raw, _: (
                _normalised(raw[..., :dimensions]) if normalizes else raw[..., :dimensions].copy()
            )
        if params.dimensions is not None:
            raise ValueError(f"dimensions are for embeddings, {task} has {info.size} classes")
        activation = info.activation if activates in (None, True) else np.array
        step = info.step_tag_id if params.step_tag_id is None else params.step_tag_id
        labels = params.returned_token_ids or pooler.returned_token_ids or None
        if labels is not None and not 0 <= min(labels) <= max(labels) < info.size:
            raise ValueError(f"returned_token_ids {labels} must be in 0..{info.size - 1}")

        def finish(raw: np.ndarray, token_ids: list[int]) -> np.ndarray:
            if task == "token_classify" and step is not None:
                raw = raw[np.asarray(token_ids) == step]
            return activation(raw if labels is None else raw[..., labels])

        return finish

    def _check_dimensions(self, dimensions: int | None) -> None:
        info = self.info
        if dimensions is None:
            return
        if info.matryoshka is None:
            raise ValueError(
                f"dimensions={dimensions}: according to its config.json, {info.name} was not trained for shorter "
                'embeddings; if it was, give hf_overrides={"is_matryoshka": True}'
            )
        if info.matryoshka and dimensions not in info.matryoshka:
            raise ValueError(
                f"dimensions={dimensions} is not supported by the model; it has {', '.join(map(str, info.matryoshka))}"
            )
        if dimensions > info.size:
            raise ValueError(f"dimensions={dimensions} exceeds the model's {info.size}")


def softmax(raw: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(raw - raw.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(raw: np.ndarray) -> np.ndarray:
    # exp(-|x|) cannot overflow.
    small = np.exp(-np.abs(raw))
    return np.where(raw >= 0, 1 / (1 + small), small / (1 + small)).astype(raw.dtype)


def _normalised(raw: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(raw, axis=-1, keepdims=True)
    return raw / np.maximum(norms, np.float32(1e-12))


def _to_list(
    params: PoolingParams | Sequence[PoolingParams] | None,
) -> Sequence[PoolingParams]:
    """The params of a call as a list. Raises ValueError."""
    all_params = params if isinstance(params, Sequence) else [params or PoolingParams()]
    if not all(isinstance(each, PoolingParams) for each in all_params):
        raise ValueError(f"pooling_params must be PoolingParams or a list of them, got {params!r}")
    return all_params


def _with_truncation(
    tokenization_kwargs: Mapping[str, Any] | None, all_params: Sequence[PoolingParams]
) -> dict[str, Any]:
    """The options of the tokenizer, and the `truncate_prompt_tokens` of the params. Raises ValueError."""
    options = dict(tokenization_kwargs or {})
    lengths = {each.truncate_prompt_tokens for each in all_params} - {None}
    if len(lengths) > 1:
        raise ValueError("truncate_prompt_tokens must be the same for all prompts of a call")
    if lengths:
        options["truncate_prompt_tokens"] = lengths.pop()
    return options


def _parsed(prompts: Any) -> list[Prompt] | None:
    is_list = isinstance(prompts, list) and bool(prompts)
    return prompts if is_list and isinstance(prompts[0], Prompt) else None


def _as_list(name: str, data: Any) -> list[Any]:
    """A list of one text or of several; a list of token ids is a single text."""
    is_one = isinstance(data, str | Mapping)
    is_ids = isinstance(data, list | tuple) and bool(data) and isinstance(data[0], int)
    if is_one or is_ids:
        return [data]
    if not isinstance(data, list | tuple) or not data:
        raise ValueError(f"{name} must be a text or a non-empty list of texts, got {data!r}")
    return list(data)


def _pooling_output(
    request_id: str, data: np.ndarray, token_ids: list[int]
) -> PoolingRequestOutput:
    return PoolingRequestOutput(
        request_id=request_id, outputs=PoolingOutput(data=data), prompt_token_ids=token_ids
    )


def _embedding(request_id: str, data: np.ndarray, token_ids: list[int]) -> PoolingRequestOutput:
    output = EmbeddingOutput(embedding=data.tolist())
    return EmbeddingRequestOutput(request_id=request_id, outputs=output, prompt_token_ids=token_ids)


def _classes(request_id: str, data: np.ndarray, token_ids: list[int]) -> PoolingRequestOutput:
    output = ClassificationOutput(probs=data.tolist())
    return ClassificationRequestOutput(
        request_id=request_id, outputs=output, prompt_token_ids=token_ids
    )


def _score(request_id: str, data: np.ndarray, token_ids: list[int]) -> PoolingRequestOutput:
    output = ScoringOutput(score=float(data[0]))
    return ScoringRequestOutput(request_id=request_id, outputs=output, prompt_token_ids=token_ids)


def _cosine(
    one: PoolingRequestOutput, other: PoolingRequestOutput, pad: int | None
) -> ScoringRequestOutput:
    a, b = _normalised(one.outputs.data), _normalised(other.outputs.data)
    between = [] if pad is None else [pad]
    return ScoringRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        outputs=ScoringOutput(score=float(a @ b)),
        prompt_token_ids=[*one.prompt_token_ids, *between, *other.prompt_token_ids],
    )
