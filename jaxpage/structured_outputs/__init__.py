"""Structured outputs: JSON, regular expressions, choices and grammars that an output must match, by llguidance."""

from jaxpage.structured_outputs.config import StructuredOutputsConfig
from jaxpage.structured_outputs.params import GuidedDecodingParams, StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "StructuredOutputsConfig", "StructuredOutputsParams"]
