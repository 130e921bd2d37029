"""Reads and changes values inside a model, under TransformerLens' names, in a dense module or an engine."""

from jaxpage.captures import Capture, Captured, capture
from jaxpage.interventions import Intervention, add, replace, scale
from jaxpage.models.taps import points
from jaxpage.research.dense import Hook, run_with_cache, run_with_hooks
from jaxpage.research_config import ResearchConfig
from jaxpage.token_positions import Positions, generated, last_prompt, prompt

__all__ = [
    "Capture",
    "Captured",
    "Hook",
    "Intervention",
    "Positions",
    "ResearchConfig",
    "add",
    "capture",
    "generated",
    "last_prompt",
    "points",
    "prompt",
    "replace",
    "run_with_cache",
    "run_with_hooks",
    "scale",
]
