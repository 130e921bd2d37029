"""From hidden states to logits and to what is computed from them, with rows and columns divided over the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpage.parallel.rows import deal_rows, pad_rows
from jaxpage.parallel.sharding import sharding
from jaxpage.sampling.sampler import Sampled


@dataclass(frozen=True, kw_only=True)
class Division:
    """Of logits [R, V] over the devices of a mesh that share the weights; without one, all is on one device."""

    mesh: Mesh | None
    vocab_size: int  # V

    @property
    def shares_columns(self) -> bool:
        """Whether each device computes a share of the vocabulary for all rows."""
        return self.mesh is None or self.vocab_size % self.mesh.size == 0

    def logits(self, model: Any, hidden: jax.Array) -> jax.Array:
        """float32[R, V] of hidden [R, E]."""
        logits = model.logits(hidden)
        if self.mesh is None:
            return logits
        # Each device makes its share, or XLA would rather exchange the weights of the head.
        shares = sharding(self.mesh, ("rows", "vocab"), logits.shape)
        return lax.with_sharding_constraint(logits, shares)

    def row_logits(self, model: Any, hidden: jax.Array) -> jax.Array:
        """The logits of rows that sample: float32[R', V], padded to a multiple of the number of devices."""
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return self.logits(model, hidden)
        hidden = pad_rows(hidden, mesh)
        if self.shares_columns:
            return self.logits(model, hidden)
        # The head is on each device: the hidden states of its rows are all that it needs.
        own = sharding(mesh, ("sampled rows",))
        return model.logits(lax.with_sharding_constraint(hidden, own))

    def stacked_row_logits(self, model: Any, hidden: jax.Array) -> jax.Array:
        """float32[P, R', V]: those of P places of each row, hidden [R, P, E]. Only if devices share the columns."""
        hidden = jnp.moveaxis(hidden, 1, 0)
        if self.mesh is not None:
            hidden = jax.vmap(partial(pad_rows, mesh=self.mesh))(hidden)
        logits = self.row_logits(model, hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:2], -1)

    def choose(self, choose: Callable[..., Sampled]) -> Callable[..., Sampled]:
        """`choose(row_logits, state, slots, positions, features)`: each device chooses for its share of the rows."""
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return self.replicated(choose)
        deal = deal_rows(choose, mesh, shares_columns=self.shares_columns)

        def choose_own(logits, state, slots, positions, features):
            num_rows = slots.size
            slots, positions = (pad_rows(x, mesh) for x in (slots, positions))
            sampled = deal(logits, state, slots, positions, features)
            return jax.tree.map(lambda x: x[:num_rows], sampled)

        return choose_own

    def replicated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with all of its arguments on each device, which computes it for itself: one exchange of the
        logits, instead of one for each thing that the function looks at.
        """
        if self.mesh is None:
            return function
        spec = PartitionSpec()
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
