"""What `LLM` does with a pooling model: `encode`, `embed`, `classify`, `score`, `reward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from jaxpage.call_guard import OneCaller
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.output_processor import OutputProcessor, make_detokenizer

if TYPE_CHECKING:
    from jaxpage.pooling.build import BuiltPooler
    from jaxpage.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from jaxpage.pooling.params import PoolingParams
    from jaxpage.pooling.pooler import Pooler, Work

UseTqdm = bool | Callable[..., tqdm]


class PoolingCalls:
    """The methods of pooling models, under vLLM's names. With a model that generates text they raise ValueError."""

    config: ResolvedConfig
    _caller: OneCaller
    _engine: Any
    _inputs: Any
    _memory: Any
    _outputs: OutputProcessor
    _pooling: BuiltPooler | None = None

    def _start_pooling(self, options: EngineConfig) -> None:
        """Build the model, and refuse what only generating models can do. Raises ValueError."""
        from jaxpage.pooling.build import build_pooler

        self._pooling = built = build_pooler(options)
        info = built.pooler.info
        self.config, self._engine = built.config, built.engine
        self._outputs = OutputProcessor(functools.partial(make_detokenizer, built.tokenizer))
        self._inputs = DoesNotGenerate(built.tokenizer, info.name, info.tasks)
        self._memory = self._inputs
        self._caller = OneCaller()

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """`.outputs.data` of each prompt: float32 [D], or [T, D] with a token task.

        `pooling_task`: "embed", "classify", "token_embed" or "token_classify"; None: the model's own task. Prompts are
        those of `generate`. Raises ValueError before anything runs if a prompt cannot be answered.
        """
        return self._pooled(
            lambda pooler: pooler.encode(
                prompts, pooling_params, pooling_task, tokenization_kwargs
            ),
            "encode",
            use_tqdm,
            lora_request,
        )

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """`.outputs.embedding` of each prompt, of unit length unless the checkpoint says otherwise.

        `prompt_name`: one of the model's sentence-transformers prompts, prepended to each text.
        """
        return self._pooled(
            lambda pooler: pooler.embed(prompts, pooling_params, tokenization_kwargs, prompt_name),
            "embed",
            use_tqdm,
            lora_request,
        )

    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """`.outputs.probs` of each prompt, one probability for each class."""
        return self._pooled(
            lambda pooler: pooler.classify(prompts, pooling_params, tokenization_kwargs),
            "classify",
            use_tqdm,
            lora_request,
        )

    def reward(
        self,
        prompts: Any,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """`.outputs.data` [T, D] of each prompt: the reward of each token or step."""
        return self._pooled(
            lambda pooler: pooler.reward(prompts, pooling_params, tokenization_kwargs),
            "reward",
            use_tqdm,
            lora_request,
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """`.outputs.score` for 1:1, 1:N or N:N texts: a cross-encoder's, or the cosine of embeddings.

        `chat_template` renders a pair, as messages with the roles "query" and "document", into a prompt.
        """
        return self._pooled(
            lambda pooler: pooler.score(
                data_1, data_2, pooling_params, tokenization_kwargs, chat_template
            ),
            "score",
            use_tqdm,
            lora_request,
        )

    def _pooled(
        self,
        prepare: Callable[[Pooler], Work],
        verb: str,
        use_tqdm: UseTqdm,
        lora_request: None,
    ) -> list[Any]:
        built = self._pooling
        if built is None:
            raise ValueError(
                f'this model generates text and cannot {verb}; LLM(model, runner="pooling") makes embeddings with it'
            )
        if lora_request:
            raise ValueError(f"lora_request={lora_request!r} is not supported; leave it None")
        with self._caller:
            work = prepare(built.pooler)
            if not use_tqdm:
                results = built.engine.run(work.texts, per_token=work.per_token)
                return work.finish(results)
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            with make_bar(
                total=len(work.texts), desc="Processed prompts", dynamic_ncols=True
            ) as bar:
                results = built.engine.run(work.texts, per_token=work.per_token, done=bar.update)
            return work.finish(results)


class DoesNotGenerate:
    """Takes the place of `LLM`'s inputs for a pooling model: every attribute but the tokenizer raises ValueError."""

    def __init__(self, tokenizer: Any, name: str, tasks: Sequence[str]):
        self.tokenizer = tokenizer
        self._refusal = (
            f"{name} does not generate text: its tasks are {' and '.join(tasks)}; use LLM.embed, classify, score, "
            "reward or encode"
        )

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._refusal)
