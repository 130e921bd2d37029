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


class Followed(NamedTuple):
    """What the model computes in a step, and the draft model after it."""

    rows: Rows
    bucket: Bucket
    batch: StepBatch
    inputs: ForwardInput  # of the model; `kept` has the layers in `Drafting.read_layers`
    hidden: jax.Array  # [T, E], of the model


class Proposed(NamedTuple):
    """The outcome of one pass of the draft model, of one token of each row."""

    kv_pool: KVPool
    hidden: jax.Array  # [R, E], for its logits
    features: jax.Array | None = None  # of a head, see `eagle_drafting`


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """`leaves` are the parameters of the engine's model and of the draft model, `kv_pool` is the pool of the latter."""

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    spec: StepSpec  # of the engine
    pool_spec: KVPoolSpec
    layer_locations: tuple[Location, ...]
    mesh: Mesh | None

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers of the engine's model whose inputs it reads."""
        return ()

    def follow(
        self, leaves: list[jax.Array], kv_pool: KVPool, state: RequestState, step: Followed
    ) -> tuple[KVPool, RequestState]:
        """The pool with keys and values of a step's tokens, and the state with what `draft` needs of them.

        Embeddings in the place of tokens are not for this model: it takes the tokens that stand for them, and as their
        rotary positions their indices.
        """
        inputs, attention = self._inputs(kv_pool, step.batch, is_decode=step.bucket.decode)
        self._model(self._read(leaves)).hidden_states(inputs)
        return attention.kv_pool, state

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
        options = rows["features"] & ~bits(LOGPROBS, TOP_LOGPROBS)
        finished, leaves = state["finished"], self._read(leaves)

        def more(carry):
            index, *_ = carry
            return index < num_drafts.max()

        def one_more(carry):
            index, kv_pool, state, features = carry
            weights, index = lax.optimization_barrier((leaves, index))  # as in `Step.decode`
            drafts = index < num_drafts
            # Rows without another draft write nowhere.
            others = finished.at[slots].set(finished[slots] | ~drafts)
            now = state | {"finished": others}
            proposed = self._propose(weights, kv_pool, now, (slots, known + index), features)
            model = _SameVocabulary(self._head(weights), self.spec.vocab_size)
            sampled = choose(model, proposed.hidden, state, slots, known + index, options)
            where = jnp.where(drafts, slots, finished.size), known + index
            token_ids = state["token_ids"].at[where].set(sampled.token_ids, mode="drop")
            return index + 1, proposed.kv_pool, state | {"token_ids": token_ids}, proposed.features

        carry = (jnp.int32(0), kv_pool, state, self._first_features(state, slots, known))
        _, kv_pool, state, _ = lax.while_loop(more, one_more, carry)
        return kv_pool, state

    def _propose(
        self,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        places: tuple[jax.Array, jax.Array],
        features: jax.Array | None,
    ) -> Proposed:
        """One pass for the token of each row at `places`, slots and positions int32[R]; all before are known."""
        del features
        slots, positions = places
        batch = self._batch_at(state, slots, positions - 1)
        inputs, attention = self._inputs(kv_pool, batch, is_decode=True)
        hidden = self._model(leaves).hidden_states(inputs)
        return Proposed(attention.kv_pool, hidden)

    def _first_features(
        self, state: RequestState, slots: jax.Array, known: jax.Array
    ) -> jax.Array | None:
        """[R, E]: what the first pass reads besides tokens; None: nothing. known: int32[R] tokens of the rows."""
        del state, slots, known
        return None

    def _batch_at(self, state: RequestState, slots: jax.Array, positions: jax.Array) -> StepBatch:
        """The tokens at these positions, int32[R], one of each row."""
        rows = {"slots": slots, "starts": positions, "num_tokens": jnp.ones_like(slots)}
        return unpack_batch(state, rows, Bucket(slots.size, slots.size, decode=True), self.spec)

    def _inputs(
        self, kv_pool: KVPool, batch: StepBatch, *, is_decode: bool
    ) -> tuple[ForwardInput, PagedAttention]:
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
        return inputs, attention

    def _head(self, leaves: list[jax.Array]) -> Any:
        """What has `logits`."""
        return self._model(leaves)

    def _read(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Those that drafts are computed from, which the other methods take."""
        return leaves[-self.treedef.num_leaves :]

    def _model(self, leaves: list[jax.Array]) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
