"""An OpenAI-compatible server: a thin translation of HTTP to `AsyncLLM`."""
