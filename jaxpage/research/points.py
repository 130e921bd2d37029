"""The named places in a model, TransformerLens' names, and what is done at each.

Letters: B batch, T tokens, E model dim, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import jax

from jaxpage.models.config import ModelConfig

# (value, name) -> what stands in its place; None leaves it as it is
Hook = Callable[[jax.Array, str], jax.Array | None]
Names = str | Iterable[str] | Callable[[str], bool] | None

_OF_A_BLOCK = (
    "hook_resid_pre",  # [B, T, E] what the layer gets
    "attn.hook_q",  # [B, T, H, D] after norms and rotary embedding, as those below
    "attn.hook_k",  # [B, T, K, D]
    "attn.hook_v",  # [B, T, K, D]
    "attn.hook_pattern",  # float32[B, H, T, T]
    "attn.hook_z",  # [B, T, H, D] what each head makes of the values
    "hook_attn_out",  # [B, T, E] what attention returns, and the MLP below
    "hook_mlp_out",  # [B, T, E]
    "hook_resid_post",  # [B, T, E] what the layer gives
)


def points(config: ModelConfig) -> list[str]:
    """All names of a model, in the order in which they are computed. Mixtures of experts have no `hook_mlp_out`."""
    of_experts = () if config.experts is None else config.experts.layers
    blocks = [
        f"blocks.{index}.{name}"
        for index in range(config.num_layers)
        for name in _OF_A_BLOCK
        if not (index in of_experts and name == "hook_mlp_out")
    ]
    return [*blocks, "ln_final.hook_normalized"]


class Taps:
    """What happens at each point while a model is traced: values are changed, then kept if they were asked for."""

    def __init__(self, config: ModelConfig, hooks: Sequence[tuple[str, Hook]], names: Names):
        """Raises ValueError for a pattern that is no point's."""
        known = points(config)
        self._hooks: dict[str, list[Hook]] = {}
        for pattern, hook in hooks:
            for name in _matching(pattern, known):
                self._hooks.setdefault(name, []).append(hook)
        self._wanted = set(known)
        if callable(names):
            self._wanted = {name for name in known if names(name)}
        elif names is not None:
            patterns = [names] if isinstance(names, str) else names
            self._wanted = {name for each in patterns for name in _matching(each, known)}
        self.seen: dict[str, jax.Array] = {}

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        """The value that goes on from this point. Raises ValueError, from a hook, for one of another shape."""
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


def _matching(pattern: str, known: Sequence[str]) -> list[str]:
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"no point is called {pattern!r}; there are {', '.join(known[:10])}, ...")
    return found
