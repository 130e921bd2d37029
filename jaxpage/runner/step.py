"""The compiled programs of a step, in one piece or two. Pure functions on the device.

`decode(leaves, kv_pool, request_state, packed) -> (kv_pool, request_state, result)`: unpack the batch, embed, layers,
final norm, LM head, masks, sample, logprobs, and again. Other steps do the same once, in two programs: `forward` leaves
the hidden states of the rows' last tokens in the request state, `sample` goes on from there, at once or in a later
step. `verify` takes its place if rows have drafts; a draft model makes them in `draft`, before `forward`. Pool and
request state are donated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpage.kv_pool import KVPool, KVPoolSpec
from jaxpage.models.inputs import ForwardInput
from jaxpage.ops.attention import PagedAttention
from jaxpage.ops.blocks import copy_blocks
from jaxpage.ops.rope import Rotate
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.drafting import Drafting, Followed
from jaxpage.runner.encoder import encode_into
from jaxpage.runner.interventions import tapped_hidden_states
from jaxpage.runner.layout import Layout
from jaxpage.runner.logits import Division
from jaxpage.runner.model_inputs import token_slots, with_extras
from jaxpage.runner.packed_tokens import Rows, last_known, unpack_batch
from jaxpage.runner.recurrence import SlotRecurrence
from jaxpage.runner.slots import (
    EXPERT_LOAD,
    append_tokens,
    drafts_of,
    keep_hidden,
    store_drafts,
    update_tables,
)
from jaxpage.runner.spec import StepSpec
from jaxpage.runner.step_result import (
    Computed,
    DeviceResult,
    empty_result,
    nothing_captured,
    to_pieces,
    with_load,
)
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.logprobs import Scores, score
from jaxpage.sampling.sampler import Sampled, sample, vocabulary

# Inlined by XLA; as a jit of its own it is traced once for all programs with as many rows.
_sample = jax.jit(sample, static_argnames=("num_top_logprobs", "logprobs_mode", "processors"))

_MOST_CHECKED = (
    512  # rows whose logits `verify` computes together: 311 MB for a vocabulary of 152 k
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The programs of an engine; `graphdef` and `treedef` turn the flat list of parameter arrays into the model.

    `packed` is int32[layout.size], what `pack` wrote for the program. With a draft model, its parameters follow those
    of the model, and the arrays of its pool those of the model's.
    """

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    spec: StepSpec
    pool_spec: KVPoolSpec
    mesh: Mesh | None = None  # of devices that share weights and heads
    drafting: Drafting | None = None  # with a draft model

    def forward(
        self,
        bucket: Bucket,
        layout: Layout,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        packed: jax.Array,
        *embeds: jax.Array,
    ) -> tuple[KVPool, RequestState, list[jax.Array]]:
        """The rows' tokens through the layers; the hidden state of each row's last token is in its slot afterwards.
        Those of all tokens come back in pieces [C, E] for `score`; behind them what is captured, in pieces [C, J, E].

        A sibling row has no tokens of its own: its last token is that of the row before it. `embeds`, if the spec has
        prompt embeddings: words [T, E], and bool[T] where they stand in the place of tokens.
        """
        kv_pool, state, rows = self._begin(layout, leaves, kv_pool, state, packed)
        if "drafts" in rows:
            state = store_drafts(state, rows)
        computed = self._hidden(bucket, leaves, kv_pool, state, rows, embeds)
        kv_pool, state, batch, hidden, captured = computed
        last = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]
        on_gpu = self._platform == "gpu"
        state = keep_hidden(state, batch.slots, last, on_gpu=on_gpu)
        if self.spec.num_drafts:
            offsets = jnp.arange(1 + self.spec.num_drafts, dtype=jnp.int32)
            tokens = last_known(batch, rows)[:, None] + offsets[None]
            checked = hidden[jnp.clip(tokens, 0, bucket.num_tokens - 1)]
            state = keep_hidden(state, batch.slots, checked, on_gpu=on_gpu, field="draft_hidden")
        pieces = to_pieces(hidden, self.spec.num_scored)
        if captured is not None:
            pieces += to_pieces(captured, self.spec.num_scored)
        return kv_pool, state, pieces

    def score(
        self, layout: Layout, leaves: list[jax.Array], hidden: jax.Array, packed: jax.Array
    ) -> Scores:
        """How likely `token_ids` [C] are after the tokens `rows` [C] of a piece [C, E] of `forward`'s hidden states."""
        scored = layout.unpack(packed)
        logits = self._division.logits(self._model(leaves), hidden[scored["rows"]])
        num_top, mode = self.spec.num_top_logprobs, self.spec.prompt_logprobs_mode
        to_score = partial(score, num_top=num_top, logprobs_mode=mode)
        return self._division.replicated(to_score)(logits, scored["token_ids"])

    def vocabulary(
        self, layout: Layout, leaves: list[jax.Array], state: RequestState, packed: jax.Array
    ) -> jax.Array:
        """float32[R, V]: the logprobs of every token (logits with the `*_logits` modes), for rows that are about to
        sample.
        """
        rows = layout.unpack(packed)
        hidden = lax.bitcast_convert_type(state["hidden"][rows["slots"]], self.spec.dtype)
        logits = self._division.logits(self._model(leaves), hidden)
        mode, processors = self.spec.logprobs_mode, self.spec.processors
        of_rows = partial(vocabulary, logprobs_mode=mode, processors=processors)
        slots, position = rows["slots"], rows["starts"] + rows["num_tokens"]
        return self._division.replicated(of_rows)(logits, state, slots, position, rows["features"])

    def sample(
        self,
        layout: Layout,
        leaves: list[jax.Array],
        state: RequestState,
        packed: jax.Array,
    ) -> tuple[RequestState, DeviceResult]:
        """A token for each row that samples, from the hidden state in its slot."""
        rows = layout.unpack(packed)
        hidden = lax.bitcast_convert_type(state["hidden"][rows["slots"]], self.spec.dtype)
        logits = self._row_logits(self._model(leaves), hidden, rows["slots"])
        state, sampled, samples = self._sample_rows(logits, state, rows)
        sampled = jax.tree.map(lambda x: x[None], sampled)
        result = DeviceResult(sampled=sampled, num_sampled=samples.astype(jnp.int32))
        return with_load(state, result)

    def draft(
        self,
        layout: Layout,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        packed: jax.Array,
    ) -> tuple[KVPool, RequestState]:
        """Drafts of the draft model behind the sequences of rows that have some, for `forward` to compute.

        Block tables and pool change here, not in that `forward`.
        """
        assert self.drafting is not None
        kv_pool, state, rows = self._begin(layout, leaves, kv_pool, state, packed)
        own, of_drafts = self._split_pool(kv_pool)
        options: dict[str, Any] = {"num_top_logprobs": 0, "logprobs_mode": "raw"}
        sample_drafts = partial(_sample, **options, processors=self.spec.processors)
        choose = self._division.choose(sample_drafts)

        def choose_tokens(model, hidden, *rest):
            return choose(self._division.row_logits(model, hidden), *rest)

        of_drafts, state = self.drafting.draft(leaves, of_drafts, state, rows, choose_tokens)
        return own + of_drafts, state

    def verify(
        self, layout: Layout, leaves: list[jax.Array], state: RequestState, packed: jax.Array
    ) -> tuple[RequestState, DeviceResult]:
        """Like `sample`, and once more after each draft of a row that is what the row has sampled in its place."""
        rows = layout.unpack(packed)
        slots, num_drafts = rows["slots"], rows["num_drafts"]
        kept = lax.bitcast_convert_type(state["draft_hidden"][slots], self.spec.dtype)
        drafts = drafts_of(state, rows, self.spec.num_drafts)
        all_logits = None
        if self._checks_at_once(slots.size):
            all_logits = self._division.stacked_row_logits(self._model(leaves), kept)

        def more(carry):
            index, _, goes_on, _ = carry
            return (index <= self.spec.num_drafts) & (goes_on > 0).any()

        def one_more(carry):
            index, state, goes_on, result = carry
            if all_logits is not None:
                logits = all_logits[index]
            else:
                weights, index = lax.optimization_barrier((leaves, index))  # as in `decode`
                logits = self._row_logits(self._model(weights), kept[:, index], slots)
            now = rows | {"starts": rows["starts"] - num_drafts + index, "samples": goes_on}
            state, sampled, samples = self._sample_rows(logits, state, now)
            draft = drafts[:, jnp.minimum(index, self.spec.num_drafts - 1)]
            goes_on = samples & (index < num_drafts) & (sampled.token_ids == draft)
            goes_on = (goes_on & ~state["finished"][slots]).astype(jnp.int32)
            return index + 1, state, goes_on, result.with_step(index, sampled, samples)

        result = empty_result(1 + self.spec.num_drafts, slots.size, self.spec)
        carry = (jnp.int32(0), state, rows["samples"], result)
        _, state, _, result = lax.while_loop(more, one_more, carry)
        return with_load(state, result)

    def decode(
        self,
        bucket: Bucket,
        layout: Layout,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        packed: jax.Array,
    ) -> tuple[KVPool, RequestState, DeviceResult]:
        """Up to `num_steps` steps of rows with one token each, fewer if every row's sequence has ended."""
        kv_pool, state, rows = self._begin(layout, leaves, kv_pool, state, packed)

        def more(carry):
            index, _, state, _ = carry
            return (index < rows["num_steps"]) & ~state["finished"][rows["slots"]].all()

        def one_more(carry):
            index, kv_pool, state, result = carry
            # Tied to the index, the weights are no loop invariants. Else XLA hoists what it derives
            # from them: on CPU a float32 copy of the whole bf16 embedding table, at every launch.
            weights, index = lax.optimization_barrier((leaves, index))
            now = rows | {"starts": rows["starts"] + index}
            computed = self._hidden(bucket, weights, kv_pool, state, now)
            kv_pool, state, _, hidden, captured = computed
            logits = self._row_logits(self._model(weights), hidden, now["slots"])
            state, sampled, samples = self._sample_rows(logits, state, now)
            result = replace(result.with_step(index, sampled, samples), captured=captured)
            return index + 1, kv_pool, state, result

        result = empty_result(self.spec.decode_steps, bucket.num_rows, self.spec)
        result = replace(result, captured=nothing_captured(bucket.num_rows, self.spec))
        carry = (jnp.int32(0), kv_pool, state, result)
        _, kv_pool, state, result = lax.while_loop(more, one_more, carry)
        return kv_pool, *with_load(state, result)

    def encode(
        self,
        names: tuple[str, ...],
        leaves: list[jax.Array],
        state: RequestState,
        destinations: jax.Array,
        *inputs: jax.Array,
    ) -> RequestState:
        """One picture, as the encoder's inputs of these names, into rows of the picture cache."""
        model, given = self._model(leaves), dict(zip(names, inputs, strict=True))
        return encode_into(state, model, destinations, given, self.spec.dtype)

    def _begin(
        self,
        layout: Layout,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        packed: jax.Array,
    ) -> tuple[KVPool, RequestState, Rows]:
        """Before the rows run, and before anything is written: copy-on-write; blocks that rows gained."""
        rows = layout.unpack(packed)
        copies = (rows["copy_sources"], rows["copy_destinations"])
        own, of_drafts = self._split_pool(kv_pool)
        kv_pool = copy_blocks(own, *copies, spec=self.pool_spec, mesh=self.mesh)
        if self.drafting is not None:
            pool_spec = self.drafting.pool_spec
            kv_pool += copy_blocks(of_drafts, *copies, spec=pool_spec, mesh=self.mesh)
        return kv_pool, update_tables(state, rows), rows

    def _split_pool(self, kv_pool: KVPool) -> tuple[KVPool, KVPool]:
        """The arrays of the model's pool, and of the draft model's."""
        number = self.pool_spec.num_arrays
        return kv_pool[:number], kv_pool[number:]

    def _model(self, leaves: list[jax.Array]) -> Any:
        own = leaves[: self.treedef.num_leaves]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, own))

    def _hidden(
        self,
        bucket: Bucket,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        rows: Rows,
        embeds: tuple[jax.Array, ...] = (),
    ) -> Computed:
        """All tokens through the layers; their experts are counted."""
        batch = unpack_batch(state, rows, bucket, self.spec)
        own, of_drafts = self._split_pool(kv_pool)
        pictures, drafting = self.spec.pictures, self.drafting
        attention = PagedAttention(
            own,
            batch,
            self.spec.groups.layer_locations,
            spec=self.pool_spec,
            one_query_per_row=bucket.decode,
            mesh=self.mesh,
            causal_without_window=pictures is not None and pictures.vision.causal_without_window,
        )
        inputs = ForwardInput(
            token_ids=batch.token_ids,
            positions=batch.positions,
            attention=attention,
            is_token=batch.is_token,
            expert_load=[] if EXPERT_LOAD in state else None,
            rotate=Rotate(in_step=True, mesh=self.mesh),
            kept=dict.fromkeys(() if drafting is None else drafting.read_layers),
        )
        inputs = with_extras(inputs, state, rows, batch, bucket, self.spec, embeds)
        recurrence = None
        if (sizes := self.spec.recurrent) is not None:
            how = {"on_gpu": self._platform == "gpu", "kernel": self.spec.state_kernel}
            how["num_drafts"] = rows.get("num_drafts")
            recurrence = SlotRecurrence(sizes, state, batch, bucket, **how, mesh=self.mesh)
            inputs = replace(inputs, recurrence=recurrence)
        model, research, captured = self._model(leaves), self.spec.research, None
        if research is None:
            hidden = model.hidden_states(inputs)
        else:
            slots = token_slots(batch, rows, bucket)
            hidden, captured = tapped_hidden_states(model, inputs, state, slots, research)
        if recurrence is not None:
            state = recurrence.state
        if drafting is not None:
            step = Followed(rows, bucket, batch, inputs, hidden)
            of_drafts, state = drafting.follow(leaves, of_drafts, state, step)
        if inputs.expert_load is not None:
            load = state[EXPERT_LOAD] + jnp.stack(inputs.expert_load)
            state = state | {EXPERT_LOAD: load}
        return Computed(attention.kv_pool + of_drafts, state, batch, hidden, captured)

    def _sample_rows(
        self, logits: jax.Array, state: RequestState, rows: Rows
    ) -> tuple[RequestState, Sampled, jax.Array]:
        """A token for each row, appended to its sequence; and bool[R], which rows sampled. logits: `_row_logits`."""
        slots = rows["slots"]
        position = rows["starts"] + rows["num_tokens"]  # of the sampled tokens
        samples = ~state["finished"][slots] & (rows["samples"] > 0)
        choose = partial(
            _sample,
            num_top_logprobs=self.spec.num_top_logprobs,
            logprobs_mode=self.spec.logprobs_mode,
            processors=self.spec.processors,
        )
        choose = self._choose_rows(choose)
        sampled = choose(logits, state, slots, position, rows["features"])
        return append_tokens(state, slots, samples, sampled.token_ids, position), sampled, samples

    def _row_logits(self, model: Any, hidden: jax.Array, slots: jax.Array) -> jax.Array:
        """The logits of rows that sample, as `_choose_rows` takes them. hidden: [R, E]; slots: int32[R]."""
        return self._division.row_logits(model, hidden)

    def _choose_rows(self, choose: Callable[..., Sampled]) -> Callable[..., Sampled]:
        """`choose(logits, state, slots, positions, features)`, with its work divided over devices."""
        return self._division.choose(choose)

    def _checks_at_once(self, num_rows: int) -> bool:
        """Whether `verify` computes the logits of all drafts together, so that it reads the LM head once. On a CPU the
        arithmetic for drafts that turn out to be wrong takes longer.
        """
        if self._platform == "cpu":
            return False
        return (
            num_rows * (1 + self.spec.num_drafts) <= _MOST_CHECKED and self._division.shares_columns
        )

    @property
    def _platform(self) -> str:
        return self.pool_spec.platform or jax.default_backend()

    @property
    def _division(self) -> Division:
        return Division(mesh=self.mesh, vocab_size=self.spec.vocab_size)
