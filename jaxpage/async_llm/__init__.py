"""The same engine behind asyncio: `AsyncLLM`, and what becomes of requests that cannot be answered."""

from jaxpage.async_llm.errors import EngineDeadError, StepFailedError
from jaxpage.async_llm.llm import AsyncLLM
from jaxpage.async_llm.streams import Stream

AsyncLLMEngine = AsyncLLM  # vLLM's older name

__all__ = ["AsyncLLM", "AsyncLLMEngine", "EngineDeadError", "StepFailedError", "Stream"]
