"""Adapters of requests, under vLLM's import path."""
