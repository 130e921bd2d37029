"""The function at each named point of a model: it calls hooks and stores values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax

from jaxpage.models.config import ModelConfig
from jaxpage.models.taps import matching, points

# (value, name) -> the new value; None: unchanged
Hook = Callable[[jax.Array, str], jax.Array | None]
Names = str | Iterable[str] | Callable[[str], bool] | None


class Taps:
    """Called at each point while a model is traced: changes values, then stores the requested ones."""

    def __init__(self, config: ModelConfig, hooks: Sequence[tuple[str, Hook]], names: Names):
        """Raises ValueError for a pattern that matches no point."""
        known = points(config)
        self._hooks: dict[str, list[Hook]] = {}
        for pattern, hook in hooks:
            for name in matching(pattern, known):
                self._hooks.setdefault(name, []).append(hook)
        self._wanted = set(known)
        if callable(names):
            self._wanted = {name for name in known if names(name)}
        elif names is not None:
            patterns = [names] if isinstance(names, str) else names
            self._wanted = {name for each in patterns for name in matching(each, known)}
        self.seen: dict[str, jax.Array] = {}

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        """The value after the hooks of this point. Raises ValueError for a hook that returns another shape."""
        for hook in self._hooks.get(name, ()):
            other = hook(value, name)
            if other is None:
                continue
            if other.shape != value.shape:
                raise ValueError(
                    f"the hook at {name} returned {list(other.shape)} in the place of {list(value.shape)}"
                )
            value = other.astype(value.dtype)
        if name in self._wanted:
            self.seen[name] = value
        return value
