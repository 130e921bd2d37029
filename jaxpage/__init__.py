"""A paged-KV LLM inference engine in JAX: the public names, each imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.async_llm import (
        AsyncLLM,
        AsyncLLMEngine,
        EngineAsleepError,
        EngineDeadError,
        StepFailedError,
    )
    from jaxpage.beam_search import BeamSearchOutput, BeamSearchSequence
    from jaxpage.config import EngineConfig
    from jaxpage.engine.snapshot import KVSnapshot
    from jaxpage.engine_args import AsyncEngineArgs, EngineArgs
    from jaxpage.inputs import TextPrompt, TokensPrompt
    from jaxpage.llm import LLM, LLMEngine
    from jaxpage.lora.request import LoRARequest
    from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput
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
    from jaxpage.pooling.params import PoolerConfig, PoolingParams
    from jaxpage.reasoning import ReasoningConfig
    from jaxpage.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxpage.speculation import SpeculativeConfig
    from jaxpage.structured_outputs import (
        GuidedDecodingParams,
        StructuredOutputsConfig,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "LLMEngine": "llm",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "AsyncEngineArgs": "engine_args",
    "EngineAsleepError": "async_llm",
    "EngineDeadError": "async_llm",
    "StepFailedError": "async_llm",
    "EngineArgs": "engine_args",
    "EngineConfig": "config",
    "KVSnapshot": "engine.snapshot",
    "SamplingParams": "sampling_params",
    "GuidedDecodingParams": "structured_outputs",
    "StructuredOutputsConfig": "structured_outputs",
    "SpeculativeConfig": "speculation",
    "StructuredOutputsParams": "structured_outputs",
    "BeamSearchParams": "sampling_params",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "BeamSearchOutput": "beam_search",
    "BeamSearchSequence": "beam_search",
    "RequestOutputKind": "sampling_params",
    "ReasoningConfig": "reasoning",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "ClassificationOutput": "pooling.outputs",
    "ClassificationRequestOutput": "pooling.outputs",
    "EmbeddingOutput": "pooling.outputs",
    "EmbeddingRequestOutput": "pooling.outputs",
    "PoolingOutput": "pooling.outputs",
    "PoolingRequestOutput": "pooling.outputs",
    "ScoringOutput": "pooling.outputs",
    "ScoringRequestOutput": "pooling.outputs",
    "PoolerConfig": "pooling.params",
    "PoolingParams": "pooling.params",
    "LoRARequest": "lora.request",
}

__all__ = [
    "LLM",
    "LLMEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineAsleepError",
    "EngineDeadError",
    "GuidedDecodingParams",
    "KVSnapshot",
    "LoRARequest",
    "Logprob",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ReasoningConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpeculativeConfig",
    "StepFailedError",
    "StructuredOutputsConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxpage' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxpage.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
