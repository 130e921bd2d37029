"""The draft model inside compiled steps: it computes what the model computes, and decodes drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpage.batch import StepBatch
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPool, KVPoolSpec
from jaxpage.models.inputs import ForwardInput
from jaxpage.ops.attention import PagedAttention
from jaxpage.ops.rope import Rotate
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.packed_tokens import Rows, unpack_batch
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.features import bits
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.logprobs import LOGPROBS, TOP_LOGPROBS
from jaxpage.sampling.sampler import Sampled

# (model, hidden, state, slots, positions, features) -> tokens; see `sampler.sample`
Choose = Callable[..., Sampled]


class _SameVocabulary(NamedTuple):
    """A model with as many tokens as the engine's: vocabularies may be padded differently."""

    model: Any
    vocab_size: int

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[R, V]."""
        logits = self.model.logits(hidden)[:, : self.vocab_size]
        padding = self.vocab_size - logits.shape[1]
        return jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """`leaves` are the parameters of the draft model, `kv_pool` is its own pool."""

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    spec: StepSpec  # of the engine
    pool_spec: KVPoolSpec
    layer_locations: tuple[Location, ...]
    mesh: Mesh | None

    def forward(
        self, leaves: list[jax.Array], kv_pool: KVPool, batch: StepBatch, *, is_decode: bool
    ) -> tuple[KVPool, jax.Array]:
        """The pool with keys and values of a step's tokens, and their hidden states [T, E].

        Embeddings in the place of tokens are not for this model: it takes the tokens that stand for them.
        """
        attention = PagedAttention(
            kv_pool,
            replace(batch, last_keys=None),
            self.layer_locations,
            spec=self.pool_spec,
            one_query_per_row=is_decode,
            mesh=self.mesh,
        )
        inputs = ForwardInput(
            token_ids=batch.token_ids,
            positions=batch.positions,
            attention=attention,
            is_token=batch.is_token,
            rotate=Rotate(in_step=True, mesh=self.mesh),
        )
        hidden = self._model(leaves).hidden_states(inputs)
        return attention.kv_pool, hidden

    def draft(
        self,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        rows: Rows,
        choose: Choose,
    ) -> tuple[KVPool, RequestState]:
        """The state with drafts behind the sequences of rows that have `num_drafts`, one after the other.

        They are chosen as the rows' tokens are, from other logits. With the same random numbers, both models choose the
        same token more often than by chance.
        """
        slots, num_drafts = rows["slots"], rows["num_drafts"]
        known = rows["starts"] + rows["num_tokens"] - num_drafts
        features = rows["features"] & ~bits(LOGPROBS, TOP_LOGPROBS)
        bucket = Bucket(slots.size, slots.size, decode=True)
        finished = state["finished"]

        def more(carry):
            index, _, _ = carry
            return index < num_drafts.max()

        def one_more(carry):
            index, kv_pool, state = carry
            weights, index = lax.optimization_barrier((leaves, index))  # as in `Step.decode`
            drafts = index < num_drafts
            # Rows without another draft write nowhere.
            others = finished.at[slots].set(finished[slots] | ~drafts)
            now = {"slots": slots, "starts": known - 1 + index, "num_tokens": jnp.ones_like(slots)}
            batch = unpack_batch(state | {"finished": others}, now, bucket, self.spec)
            kv_pool, hidden = self.forward(weights, kv_pool, batch, is_decode=True)
            model = _SameVocabulary(self._model(weights), self.spec.vocab_size)
            sampled = choose(model, hidden, state, slots, known + index, features)
            where = jnp.where(drafts, slots, finished.size), known + index
            token_ids = state["token_ids"].at[where].set(sampled.token_ids, mode="drop")
            return index + 1, kv_pool, state | {"token_ids": token_ids}

        _, kv_pool, state = lax.while_loop(more, one_more, (jnp.int32(0), kv_pool, state))
        return kv_pool, state

    def _model(self, leaves: list[jax.Array]) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
