"""Looking into a model, and changing what is inside: values by TransformerLens' names, on a dense module."""

from jaxpage.research.dense import Hook, run_with_cache, run_with_hooks
from jaxpage.research.points import points

__all__ = ["Hook", "points", "run_with_cache", "run_with_hooks"]
