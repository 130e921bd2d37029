"""Requests as clients write them: pydantic models of OpenAI's fields and vLLM's extras."""
