"""Request bodies: pydantic models of OpenAI's fields and vLLM's extras."""
