"""The steps of `numerics="strict"`: a token's results are the same, bit for bit, in every batch, chunk and program.

All arithmetic of a layer is done one tile of tokens at a time (`runner.tiles`), and each token attends separately, to
tiles of keys in order. Between the tiles only data moves: keys and values into the pool.

A layer is called twice for each tile: first for its queries, keys and values, then, when the keys of all tokens are in
the pool, for the rest. XLA removes what a call does not use, so layers need not be written in two halves.

On several devices the body of a loop has their exchanges in it: each tile is summed over the devices on its own. What
enters and leaves a body has a given sharding there, so that XLA divides the work alike in every program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxpage.batch import StepBatch
from jaxpage.config import ResolvedConfig
from jaxpage.environment import compiler_flags
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPool, Layer
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.rope import Rotation
from jaxpage.ops.attention import POOL_BY_HEAD, on_shares
from jaxpage.parallel.heads import HeadShares, share_heads
from jaxpage.parallel.sharding import sharding
from jaxpage.plan import NULL_SLOT
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.layout import Layout
from jaxpage.runner.packed_tokens import Rows, token_rows, unpack_batch
from jaxpage.runner.step import Step
from jaxpage.runner.step_result import Computed
from jaxpage.runner.tiles import by_tiles
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.logprobs import Scores, log_normaliser, score
from jaxpage.sampling.sampler import Sampled, vocabulary
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import xla

ROW_TILE = 8  # rows that are sampled together
GPU_FLAG = "--xla_gpu_autotune_level=0"
Part = Callable[[Any], Any]  # a module of its arrays, see `CausalLM.part`


def check_strict(config: ResolvedConfig, model: ModelConfig, platform: str) -> None:
    """Raises ValueError for options and models that cannot be computed by tiles, or on a GPU without GPU_FLAG."""
    if platform == "gpu" and GPU_FLAG not in compiler_flags().split():
        raise ValueError(
            f'numerics="strict" needs XLA_FLAGS={GPU_FLAG} on a GPU, set before jax starts. Otherwise XLA measures '
            "several ways to compute each product and chooses one for each program, so that bits differ"
        )
    reasons = {
        f"quantization={config.quantization!r}": config.quantization not in (None, "dequantize"),
        f"kv_cache_dtype={config.kv_cache_dtype!r}": config.kv_cache_dtype != config.dtype,
        "enable_lora=True": config.enable_lora,
        "a draft model": config.draft_model is not None,
        "enable_prompt_embeds=True": config.enable_prompt_embeds,
    }
    wrong = [*(name for name, is_so in reasons.items() if is_so), *unsupported_models(model)]
    if wrong:
        raise ValueError(
            f'numerics="strict" is not for {", ".join(wrong)}; take numerics="fast", whose tokens are the same in '
            "every batch as well, but not the last bits of their logprobs"
        )


def unsupported_models(model: ModelConfig) -> list[str]:
    """Which models that cannot be computed by tiles this one is among."""
    kinds = {
        "models with experts": model.experts is not None,
        # Its layers differ in heads, share keys and values, and have embeddings of their own.
        "Gemma 4": model.gemma4 is not None,
        "models with multi-head latent attention": model.latent is not None,
        "models with a recurrent state": model.recurrent is not None,
        "models that take pictures": model.vision is not None,
    }
    return [name for name, is_so in kinds.items() if is_so]


def hidden_states(
    model: CausalLM,
    batch: StepBatch,
    rows_of_tokens: jax.Array,
    kv_pool: KVPool,
    layer_locations: Sequence[Location | None],
    mesh: Mesh | None = None,
) -> tuple[KVPool, jax.Array]:
    """The hidden states [T, E] of a step's tokens, after the final norm, and the pool with their keys and values.

    `rows_of_tokens`: int32[T]. `mesh`: of devices that share weights and heads.
    """
    config = model.config
    devices = Devices(mesh, config.num_heads, config.num_kv_heads)
    is_token = batch.is_token
    assert is_token is not None
    num_tokens = batch.query_starts[-1]
    ropes = tuple(dict.fromkeys(config.ropes))

    def begin(constants, token_ids, positions):
        table = decoder(constants)
        x = devices.replicated(table.placed(table.embed(token_ids), positions))
        return x, [rope.arrays(positions, x.dtype) for rope in ropes]

    decoder, weights = model.part("model")
    x, arrays = by_tiles(begin, num_tokens, weights, batch.token_ids, batch.positions)
    rotations = dict(zip(ropes, arrays, strict=True))
    lens = jnp.where(is_token, batch.positions + 1, 0)
    pool = list(kv_pool)
    for index, rope in enumerate(config.ropes):
        location = layer_locations[index]
        assert location is not None
        group, array, _ = location
        tables = _wide(batch.block_tables[group], pool[array].shape[1])[rows_of_tokens]
        layer, weights = model.part(f"model.layers.{index}")
        tiled = TiledLayer(layer, devices)
        q, k, v = by_tiles(tiled.project, num_tokens, weights, x, *rotations[rope])
        pool[array] = devices.write(pool[array], q, k, v, batch.slot_mappings[group])
        x = by_tiles(
            tiled.finish,
            num_tokens,
            (weights, pool[array]),
            *(x, q, tables, lens, *rotations[rope]),
        )

    def end(constants, x):
        return last(constants)(x)

    last, norm = model.part("model.norm")
    return pool, by_tiles(end, num_tokens, norm, x)


def _wide(tables: jax.Array, block_size: int) -> jax.Array:
    """Block tables [R, M] with enough columns for a tile of keys, whose size is the same in every program."""
    missing = xla.TILE_KV_ONE // block_size - tables.shape[1]
    return jnp.pad(tables, ((0, 0), (0, max(0, missing))))


@dataclass(frozen=True)
class TiledLayer:
    """What a layer computes of a tile of tokens, in two halves."""

    layer: Part
    devices: Devices

    def project(self, weights: Any, x: jax.Array, *rotation: jax.Array) -> Any:
        """q [T, H, D], k and v [T, K, D] of a layer, rotated. rotation: of `Rope.arrays`."""
        found: list[tuple[jax.Array, ...]] = []

        def record(index, q, k, v, **options):
            found.append((q, k, v))
            return q

        self.layer(weights)(x, Rotation(*rotation), record)
        return self.devices.by_head(*found[0])

    def finish(
        self,
        constants: Any,
        x: jax.Array,
        q: jax.Array,
        tables: jax.Array,
        lens: jax.Array,
        *rotation: jax.Array,
    ) -> jax.Array:
        """The output of a layer for x [T, E], once the keys that its tokens see are in the pool."""
        weights, pool = constants
        starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)

        def attend(index, _q, k, v, **options):
            def attend_own(pool, q, k, v, *rows):
                out = xla.paged_attention(q, pool, *rows, one_query_per_row=True, **options)
                return pool, out

            own = self.devices.on_shares(attend_own, num_others=3)
            return own(pool, q, k, v, tables, lens, starts)[1]

        return self.devices.replicated(self.layer(weights)(x, Rotation(*rotation), attend))


def logits_of(
    model: CausalLM, hidden: jax.Array, num_rows: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """float32[R, V]: logits of hidden [R, E], of which the first `num_rows`, int32[], are not padding."""
    whole, weights = model.part("")

    def of_tile(constants, x):
        logits = whole(constants).logits(x)
        if mesh is None:
            return logits
        shares = sharding(mesh, ("rows", "vocab"), logits.shape)
        return lax.with_sharding_constraint(logits, shares)

    return by_tiles(of_tile, num_rows, weights, hidden)


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, temperature: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """float32[R]: log-probabilities of tokens int32[R] under logits [R, V] at temperatures float32[R] above 0."""

    def of_tile(_, logits, token_ids, temperature):
        logits = logits / temperature[:, None]
        own = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
        return own - log_normaliser(logits)

    return by_tiles(of_tile, num_rows, (), logits, token_ids, temperature, tile=ROW_TILE)


@dataclass(frozen=True)
class Devices:
    """How a layer with so many heads is divided among the devices of a mesh; None: there is one."""

    mesh: Mesh | None
    num_heads: int
    num_kv_heads: int

    @property
    def _shares(self) -> HeadShares | None:
        if self.mesh is None or self.mesh.size == 1:
            return None
        return share_heads(self.num_heads, self.num_kv_heads, self.mesh.size)

    def replicated(self, x: jax.Array) -> jax.Array:
        """x on each device."""
        if self.mesh is None:
            return x
        return lax.with_sharding_constraint(x, sharding(self.mesh))

    def by_head(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays [T, heads, D] as the weights that they come from: each device has its heads, or all of them."""
        if self.mesh is None:
            return arrays
        by_head = [sharding(self.mesh, ("rows", "heads", "head_dim"), x.shape) for x in arrays]
        pairs = zip(arrays, by_head, strict=True)
        return tuple(lax.with_sharding_constraint(x, each) for x, each in pairs)

    def write(
        self, pool: Layer, q: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> Layer:
        """The array of the pool with k and v [T, K, D] in the slots int32[T]."""

        def write_own(pool, q, k, v, slots):
            return write_kv(pool, k, v, slots), q

        return self.on_shares(write_own, num_others=1)(pool, q, k, v, slots)[0]

    def on_shares(self, attend: Callable, *, num_others: int) -> Callable:
        """`attend(pool, q, k, v, *others)` with each device's heads."""
        if self.mesh is None or self._shares is None:
            return attend
        return on_shares(attend, self.mesh, self._shares, POOL_BY_HEAD, num_others=num_others)


class StrictStep(Step):
    """The same programs, computed by tiles. For models without experts or adapters."""

    def _hidden(
        self,
        bucket: Bucket,
        leaves: list[jax.Array],
        kv_pool: KVPool,
        state: RequestState,
        rows: Rows,
        embeds: tuple[jax.Array, ...] = (),
    ) -> Computed:
        batch = unpack_batch(state, rows, bucket, self.spec)
        kv_pool, hidden = hidden_states(
            self._model(leaves),
            batch,
            token_rows(rows["num_tokens"], bucket),
            kv_pool,
            self.spec.groups.layer_locations,
            self.mesh,
        )
        return Computed(kv_pool, state, batch, hidden)

    def _row_logits(self, model: Any, hidden: jax.Array, slots: jax.Array) -> jax.Array:
        return logits_of(model, hidden, _num_rows(slots), self.mesh)

    def _checks_at_once(self, num_rows: int) -> bool:
        return False

    def _choose_rows(self, choose: Callable[..., Sampled]) -> Callable[..., Sampled]:
        def choose_by_tiles(logits, state, slots, positions, features):
            def of_tile(constants, logits, slots, positions):
                state, features = constants
                return choose(logits, state, slots, positions, features)

            num_rows = _num_rows(slots)
            sampled = by_tiles(
                of_tile,
                num_rows,
                (state, features),
                *(logits, slots, positions),
                tile=ROW_TILE,
            )
            if self.spec.logprobs_mode not in ("raw", "temperature"):
                return sampled
            temperature = jnp.ones(slots.shape)
            if self.spec.logprobs_mode == "temperature":
                own = state["temperature"][slots]
                temperature = jnp.where(own > 0, own, 1.0)
            # Not the sampler's logprobs: a trainer's program has no sampler, but it has this loop.
            found = token_logprobs(logits, sampled.token_ids, temperature, num_rows)
            return replace(sampled, logprobs=found)

        return self._division.replicated(choose_by_tiles)

    def score(
        self, layout: Layout, leaves: list[jax.Array], hidden: jax.Array, packed: jax.Array
    ) -> Scores:
        scored = layout.unpack(packed)
        token_ids = scored["token_ids"]
        # Always all of them, in a form that hides the constant from the compiler.
        num_tokens = jnp.where(token_ids[0] >= 0, token_ids.size, 0)
        logits = logits_of(self._model(leaves), hidden[scored["rows"]], num_tokens, self.mesh)
        return self._division.replicated(self._scores)(logits, token_ids, num_tokens)

    def _scores(self, logits: jax.Array, token_ids: jax.Array, num_tokens: jax.Array) -> Scores:
        mode = self.spec.prompt_logprobs_mode
        found = by_tiles(
            lambda _, *tile: score(*tile, num_top=self.spec.num_top_logprobs, logprobs_mode=mode),
            *(num_tokens, (), logits, token_ids),
            tile=ROW_TILE,
        )
        if mode == "raw_logits":
            return found
        ones = jnp.ones(token_ids.shape)
        return replace(found, logprobs=token_logprobs(logits, token_ids, ones, num_tokens))

    def vocabulary(
        self, layout: Layout, leaves: list[jax.Array], state: RequestState, packed: jax.Array
    ) -> jax.Array:
        rows = layout.unpack(packed)
        hidden = lax.bitcast_convert_type(state["hidden"][rows["slots"]], self.spec.dtype)
        mode, processors = self.spec.logprobs_mode, self.spec.processors

        def of_tile(constants, logits, slots, positions):
            state, features = constants
            given = (logits, state, slots, positions, features)
            return vocabulary(*given, logprobs_mode=mode, processors=processors)

        def by_row_tiles(logits, state, slots, positions, features):
            constants = (state, features)
            given = (logits, slots, positions)
            return by_tiles(of_tile, _num_rows(slots), constants, *given, tile=ROW_TILE)

        slots, positions = rows["slots"], rows["starts"] + rows["num_tokens"]
        logits = logits_of(self._model(leaves), hidden, _num_rows(slots), self.mesh)
        return self._division.replicated(by_row_tiles)(
            logits, state, slots, positions, rows["features"]
        )


def _num_rows(slots: jax.Array) -> jax.Array:
    """int32[]: the number of rows up to the last one that is not padding."""
    number = jnp.arange(1, slots.size + 1, dtype=jnp.int32)
    return jnp.where(slots != NULL_SLOT, number, 0).max()
