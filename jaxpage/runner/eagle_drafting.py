"""An EAGLE-3 head inside compiled steps, see `models.eagle3`.

Slot p of its KV pool is of the pair of the token at p + 1 and the feature of the token at p. So a step's batch serves
the head as it is, with other tokens. What the model has just sampled is not known yet when `follow` computes the last
pair of a row: `draft` computes it again, in its first pass. Where a row samples without drafts, and behind a prefix
that was found in the cache, a pair may keep a wrong token. This makes drafts worse, and changes no token of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpage.batch import StepBatch
from jaxpage.draft_model import DraftModel
from jaxpage.kv_pool import KVPool
from jaxpage.runner.drafting import Drafting, Followed, Proposed
from jaxpage.runner.packed_tokens import last_known, token_rows
from jaxpage.runner.slots import FEATURES, keep_hidden
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState


@dataclass(frozen=True, kw_only=True)
class EagleDrafting(Drafting):
    """The head reads the embedding of the engine's model, unless it has its own."""

    layers: tuple[int, ...]  # `EagleOptions.layers`
    embedding: int | None  # the model's, a number of a parameter; None: the head has its own

    @property
    def read_layers(self) -> tuple[int, ...]:
        return self.layers

    def follow(
        self, leaves: list[jax.Array], kv_pool: KVPool, state: RequestState, step: Followed
    ) -> tuple[KVPool, RequestState]:
        batch, bucket = step.batch, step.bucket
        read = [step.kept[layer] for layer in self.layers]
        hidden = jnp.concatenate(read, axis=-1) if read else step.hidden
        leaves = self._read(leaves)
        features = self._model(leaves).features(hidden)
        slots = batch.slots[token_rows(step.rows["num_tokens"], bucket)]
        batch = replace(batch, token_ids=_tokens_after(state, slots, batch.positions))
        kv_pool, *_ = self._pass(leaves, kv_pool, batch, features, is_decode=bucket.decode)
        return kv_pool, self._with_features(state, step, features)

    def _with_features(
        self, state: RequestState, step: Followed, features: jax.Array
    ) -> RequestState:
        """The features of each row's last known token and of the drafts after it, in its slot, for the next step."""
        batch, places = step.batch, 1 + self.spec.num_drafts
        first = last_known(batch, step.rows)[:, None]
        # That of position p is in place p % places, where it is found without the number of accepted drafts.
        position = (step.rows["starts"] + step.rows["num_tokens"])[:, None] - 1
        position -= step.rows["num_drafts"][:, None]
        number = (jnp.arange(places, dtype=jnp.int32)[None] - position) % places
        found = features[jnp.clip(first + number, 0, features.shape[0] - 1)]
        on_gpu = (self.pool_spec.platform or jax.default_backend()) == "gpu"
        return keep_hidden(state, batch.slots, found, on_gpu=on_gpu, field=FEATURES)

    def _first_features(
        self, state: RequestState, slots: jax.Array, known: jax.Array
    ) -> jax.Array | None:
        kept = state[FEATURES][slots, (known - 2) % (1 + self.spec.num_drafts)]
        return lax.bitcast_convert_type(kept, self.spec.dtype)

    def _propose(
        self,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        places: tuple[jax.Array, jax.Array],
        features: jax.Array | None,
    ) -> Proposed:
        assert features is not None
        slots, positions = places
        batch = self._batch_at(state, slots, positions - 2)
        batch = replace(batch, token_ids=_tokens_after(state, slots, batch.positions))
        return self._pass(leaves, kv_pool, batch, features, is_decode=True)

    def _pass(
        self,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        batch: StepBatch,
        features: jax.Array,
        *,
        is_decode: bool,
    ) -> Proposed:
        inputs, attention = self._inputs(kv_pool, batch, is_decode=is_decode)
        embeds = None
        if self.embedding is not None:
            embeds = leaves[-1].at[batch.token_ids].get(mode="clip")
        hidden, features = self._model(leaves).propose(inputs, features, embeds)
        return Proposed(attention.kv_pool, hidden, features)

    def _read(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The embedding is the last one."""
        own = super()._read(leaves)
        return own if self.embedding is None else [*own, leaves[self.embedding]]

    def _model(self, leaves: list[jax.Array]) -> Any:
        return super()._model(leaves[: self.treedef.num_leaves])


def make_drafting(
    model: nnx.Module, draft_model: DraftModel, spec: StepSpec, mesh: Mesh | None
) -> Drafting:
    """Of an engine with this model and this draft model or head."""
    graphdef, state = nnx.split(draft_model.model)
    options: dict[str, Any] = {
        "graphdef": graphdef,
        "treedef": jax.tree.structure(state),
        "spec": spec,
        "pool_spec": draft_model.pool,
        "layer_locations": draft_model.layer_locations,
        "mesh": mesh,
    }
    eagle = draft_model.model.config.eagle
    if eagle is None:
        return Drafting(**options)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    embedding = None if eagle.has_embedding else paths.index(("model", "embed_tokens", "weight"))
    return EagleDrafting(**options, layers=eagle.layers, embedding=embedding)


def _tokens_after(state: RequestState, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """int32[T]: the tokens behind these positions of sequences. Those that are not known yet mean nothing."""
    token_ids = state["token_ids"]
    return token_ids[slots, jnp.minimum(positions + 1, token_ids.shape[1] - 1)]
