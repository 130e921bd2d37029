"""An EAGLE head inside compiled steps, see `models.eagle3` and `models.eagle`.

Slot p of its KV pool holds keys and values of the pair of the token at p + 1 and the feature of the token at p. So the
head takes a step's batch, with the next token in the place of each. The token of a row's last pair is sampled only
after the step: so the next step computes this pair again, in the first pass of `draft`, and for rows without drafts in
`follow`.

Rotary positions are those that the model has for the token at p: behind pictures they differ from p. An MTP layer reads
embeddings that stand in the place of tokens, as those of pictures; as in vLLM, EAGLE heads read the tokens. The
embedding behind the last token of a chunk may not be there yet: so this pair too is computed again in the next step.

The last pair of a prefix from the cache has the token that came next where the prefix was computed, and sequences of
one prompt may share its last pair. This makes drafts worse, and changes no token of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpage.batch import StepBatch
from jaxpage.draft_model import DraftModel
from jaxpage.kv_pool import KVPool
from jaxpage.models.config import EagleOptions
from jaxpage.models.inputs import ForwardInput
from jaxpage.runner.drafting import Drafting, Followed, Proposed
from jaxpage.runner.packed_tokens import last_known, token_rows
from jaxpage.runner.slots import (
    FEATURES,
    FEATURES_POSITION,
    FEATURES_START,
    POSITION_OFFSET,
    has_positions,
    keep_hidden,
)
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState

# [T, ...] and bool[T]: embeddings, which stand in the place of tokens where this is set.
Given = tuple[jax.Array, jax.Array]


class Pairs(NamedTuple):
    """Each of a token and the feature of the token before it, at whose position it stands."""

    batch: StepBatch  # with the later token in the place of each
    positions: jax.Array  # rotary ones, int32[T] or int32[3, T]
    features: jax.Array  # [T, E]
    given: Given | None = None  # in the place of these tokens


@dataclass(frozen=True, kw_only=True)
class EagleDrafting(Drafting):
    """The head uses embedding and LM head of the engine's model as far as it has none of its own."""

    options: EagleOptions
    model_graphdef: nnx.GraphDef  # of the engine's model
    model_treedef: jax.tree_util.PyTreeDef
    shared: tuple[int, ...]  # numbers of its parameters that are used

    @property
    def read_layers(self) -> tuple[int, ...]:
        return self.options.layers

    def follow(
        self, leaves: list[jax.Array], kv_pool: KVPool, state: RequestState, step: Followed
    ) -> tuple[KVPool, RequestState]:
        batch, bucket, inputs = step.batch, step.bucket, step.inputs
        kept: dict[int, Any] = inputs.kept
        read = [kept[layer] for layer in self.read_layers]
        hidden = jnp.concatenate(read, axis=-1) if read else step.hidden
        leaves = self._read(leaves)
        features = self._model(leaves).features(hidden)
        kv_pool = self._complete(leaves, kv_pool, state, step)
        token_row = token_rows(step.rows["num_tokens"], bucket)
        slots = batch.slots[token_row]
        batch = replace(batch, token_ids=_tokens_after(state, slots, batch.positions))
        given = self._given(inputs)
        if given is not None:
            given = given_after(given, token_row)
        pairs = Pairs(batch, inputs.positions, features, given)
        kv_pool, *_ = self._pass(leaves, kv_pool, pairs, is_decode=bucket.decode)
        return kv_pool, self._keep(state, step, features)

    def _complete(
        self, leaves: list[jax.Array], kv_pool: KVPool, state: RequestState, step: Followed
    ) -> KVPool:
        """The pool with the pair of each row's first token and the feature before it, if that is kept in its slot."""
        rows, given = step.rows, self._given(step.inputs)
        slots, starts, finished = rows["slots"], rows["starts"], state["finished"]
        number = starts - 1 - state[FEATURES_START][slots]
        is_kept = (number >= 0) & (number <= self.spec.num_drafts) & (rows["num_tokens"] > 0)
        now = state | {"finished": finished.at[slots].set(finished[slots] | ~is_kept)}
        features = self._features_at(state, slots, starts - 1)
        pairs = self._pairs_at(now, (slots, starts + 1), features)
        if given is not None:
            values, where = given
            first = jnp.minimum(step.batch.query_starts[:-1], where.size - 1)
            pairs = pairs._replace(given=(values[first], where[first]))
        return self._pass(leaves, kv_pool, pairs, is_decode=True).kv_pool

    def _keep(self, state: RequestState, step: Followed, features: jax.Array) -> RequestState:
        """The state with the features of each row's last known token and of the drafts after it."""
        rows, slots = step.rows, step.batch.slots
        offsets = jnp.arange(1 + self.spec.num_drafts, dtype=jnp.int32)
        tokens = last_known(step.batch, rows)[:, None] + offsets[None]
        found = features[jnp.clip(tokens, 0, features.shape[0] - 1)]
        on_gpu = (self.pool_spec.platform or jax.default_backend()) == "gpu"
        state = keep_hidden(state, slots, found, on_gpu=on_gpu, field=FEATURES)
        position = rows["starts"] + rows["num_tokens"] - rows["num_drafts"] - 1
        state = state | {FEATURES_START: state[FEATURES_START].at[slots].set(position)}
        if not has_positions(self.spec):
            return state
        positions = jnp.broadcast_to(step.inputs.positions, (3, features.shape[0]))
        found = positions[:, jnp.clip(tokens[:, 0], 0, features.shape[0] - 1)].T
        return state | {FEATURES_POSITION: state[FEATURES_POSITION].at[slots].set(found)}

    def _first_features(
        self, state: RequestState, slots: jax.Array, known: jax.Array
    ) -> jax.Array | None:
        return self._features_at(state, slots, known - 2)

    def _features_at(
        self, state: RequestState, slots: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """[R, E]: those kept in the slots of rows, at positions int32[R]."""
        number = jnp.clip(positions - state[FEATURES_START][slots], 0, self.spec.num_drafts)
        return lax.bitcast_convert_type(state[FEATURES][slots, number], self.spec.dtype)

    def _propose(
        self,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        places: tuple[jax.Array, jax.Array],
        features: jax.Array | None,
    ) -> Proposed:
        assert features is not None
        pairs = self._pairs_at(state, places, features)
        return self._pass(leaves, kv_pool, pairs, is_decode=True)

    def _pairs_at(
        self, state: RequestState, places: tuple[jax.Array, jax.Array], features: jax.Array
    ) -> Pairs:
        """Those that guess the tokens at `places`, slots and positions int32[R]."""
        slots, positions = places
        batch = self._batch_at(state, slots, positions - 2)
        indices = rotary = batch.positions
        if has_positions(self.spec):
            # The last token of a prompt, or of a part of it, may be one of a picture; all others are text.
            is_first = state[FEATURES_START][slots] == indices
            later = indices + state[POSITION_OFFSET][slots]
            rotary = jnp.where(is_first, state[FEATURES_POSITION][slots].T, later)
        batch = replace(batch, token_ids=_tokens_after(state, slots, indices))
        return Pairs(batch, rotary, features)

    def _pass(
        self, leaves: list[jax.Array], kv_pool: KVPool, pairs: Pairs, *, is_decode: bool
    ) -> Proposed:
        inputs, attention = self._inputs(kv_pool, pairs.batch, is_decode=is_decode)
        inputs, embeds = replace(inputs, positions=pairs.positions), None
        if not self.options.has_embedding:
            embeds = self._engine_model(leaves).model.embed_tokens(inputs.token_ids)
            if pairs.given is not None:
                values, where = pairs.given
                embeds = jnp.where(where[:, None], values[:, : embeds.shape[1]], embeds)
        hidden, features = self._model(leaves).propose(inputs, pairs.features, embeds)
        return Proposed(attention.kv_pool, hidden, features)

    def _given(self, inputs: ForwardInput) -> Given | None:
        """What this head reads in the place of a step's tokens, if there may be something."""
        if self.options.mtp_layer is None or inputs.embeds is None or inputs.is_embed is None:
            return None
        return inputs.embeds, inputs.is_embed

    def _head(self, leaves: list[jax.Array]) -> Any:
        return self._model(leaves) if self.options.has_head else self._engine_model(leaves)

    def _read(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Those of the engine's model come last."""
        return [*super()._read(leaves), *(leaves[number] for number in self.shared)]

    def _model(self, leaves: list[jax.Array]) -> Any:
        return super()._model(leaves[: self.treedef.num_leaves])

    def _engine_model(self, leaves: list[jax.Array]) -> Any:
        """With the parameters that are shared alone."""
        found: list[Any] = [None] * self.model_treedef.num_leaves
        for number, leaf in zip(self.shared, leaves[self.treedef.num_leaves :], strict=True):
            found[number] = leaf
        return nnx.merge(self.model_graphdef, jax.tree.unflatten(self.model_treedef, found))


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
    prefixes = [] if eagle.has_embedding else [("model", "embed_tokens")]
    prefixes += [] if eagle.has_head else [("lm_head",)]
    of_model, state = nnx.split(model)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    shared = [n for n, path in enumerate(paths) if any(path[: len(x)] == x for x in prefixes)]
    return EagleDrafting(
        **options,
        options=eagle,
        model_graphdef=of_model,
        model_treedef=jax.tree.structure(state),
        shared=tuple(shared),
    )


def _tokens_after(state: RequestState, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """int32[T]: the tokens behind these positions of sequences. Those that are not known yet mean nothing."""
    token_ids = state["token_ids"]
    return token_ids[slots, jnp.minimum(positions + 1, token_ids.shape[1] - 1)]


def given_after(given: Given, token_row: jax.Array) -> Given:
    """In the place of the token behind each, as far as a row has it. token_row: int32[T], the row of each."""
    values, where = given
    goes_on = token_row[:-1] == token_row[1:]
    return jnp.roll(values, -1, axis=0), jnp.append(where[1:] & goes_on, False)
