"""The engine behind asyncio: `AsyncLLM`, and the errors of requests that cannot be answered."""

from jaxpage.async_llm.llm import AsyncLLM
from jaxpage.async_llm.streams import Stream
from jaxpage.engine.errors import EngineAsleepError, EngineDeadError, StepFailedError

AsyncLLMEngine = AsyncLLM  # vLLM's older name

__all__ = [
    "AsyncLLM",
    "AsyncLLMEngine",
    "EngineAsleepError",
    "EngineDeadError",
    "StepFailedError",
    "Stream",
]
