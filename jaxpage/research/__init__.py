"""Looking into a model and changing what is inside: by TransformerLens' names, on a dense module or in an engine."""

from jaxpage.interventions import (
    Intervention,
    ResearchConfig,
    add,
    generated,
    last_prompt,
    prompt,
    replace,
    scale,
)
from jaxpage.models.taps import points
from jaxpage.research.dense import Hook, run_with_cache, run_with_hooks

__all__ = [
    "Hook",
    "Intervention",
    "ResearchConfig",
    "add",
    "generated",
    "last_prompt",
    "points",
    "prompt",
    "replace",
    "run_with_cache",
    "run_with_hooks",
    "scale",
]
