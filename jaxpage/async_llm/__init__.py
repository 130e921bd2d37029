"""The same engine behind asyncio: `AsyncLLM`, and what becomes of requests that cannot be answered."""

from jaxpage.async_llm.llm import AsyncLLM
from jaxpage.async_llm.streams import Stream
from jaxpage.engine.errors import EngineDeadError, StepFailedError

AsyncLLMEngine = AsyncLLM  # vLLM's older name

__all__ = ["AsyncLLM", "AsyncLLMEngine", "EngineDeadError", "StepFailedError", "Stream"]
