"""The border between host and device: owns the KV pool and the request state, launches compiled steps.

What this file knows: buckets, programs, the order in which buffers are donated. What it must never learn: requests'
meaning (the scheduler's), what a layer computes (the model's), how a token is chosen (the sampler's). A feature that
needs the device arrives as a field of the plan or of the request state and a pure function in `step`.

Only the runner holds the pool and the state, and only `launch` replaces them. Steps run on the device in the order
of their launches; the host may reuse a block or a slot as soon as no later plan refers to it.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from flax import nnx

from jaxpage.kv_pool import KVPoolSpec
from jaxpage.plan import Feature, StepPlan, StepResult
from jaxpage.runner.buckets import Bucket, choose_bucket, first_buckets
from jaxpage.runner.pack import admission_layout, pack_admission, pack_step, step_layout
from jaxpage.runner.programs import CompilationCounter, Lowering, Programs, compile_program
from jaxpage.runner.step import (
    DeviceResult,
    Step,
    StepSpec,
    abstract_request_state,
    allocate_request_state,
    make_admit,
)

ADMIT = "admit"


@dataclass(frozen=True)
class Launched:
    """A step under way. `collect` turns it into a `StepResult`."""

    plan: StepPlan
    result: DeviceResult


class Runner:
    """Runs the plans of one engine on one model.

    `model` is an NNX module with arrays in place; its parameters are read anew at each launch, so whoever owns the
    module (a trainer, say) may replace them between steps.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        buckets: tuple[Bucket, ...],
        pool_spec: KVPoolSpec,
        step_spec: StepSpec,
        ahead_of_time: bool = True,
    ):
        self._spec = step_spec
        self.pool_spec = pool_spec
        self.buckets = buckets
        self._graphdef, state = nnx.split(model)
        self._treedef = jax.tree.structure(state)
        # The live variables themselves, in the order of `treedef`: their arrays are looked up at each launch.
        self._variables = [variable for _, variable in nnx.to_flat_state(state)]
        self._seen = [weakref.ref(leaf) for leaf in self._leaves()]
        self._ahead_of_time = ahead_of_time
        self._counter = CompilationCounter()
        names = [ADMIT, *(bucket.name for bucket in buckets)]
        self.programs = Programs({name: self._lowering(name) for name in names})

    def warmup(self) -> None:
        """Allocate pool and state, and compile what the first requests need (see `Programs`). Call once.

        Compiles nothing if not `ahead_of_time`: each program at its first use then.
        """
        if self._ahead_of_time:
            first = [ADMIT, *(bucket.name for bucket in first_buckets(self.buckets))]
            self.programs.start(first)
        self._allocate()

    def _allocate(self) -> None:
        self._kv_pool = self.pool_spec.allocate()
        self._state = allocate_request_state(self._spec)
        jax.block_until_ready((self._kv_pool, self._state))

    def wait_until_warm(self) -> None:
        """Until every program is compiled. Raises what the compiler raised."""
        self.programs.wait()

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the request state."""
        leaves = jax.tree.leaves(abstract_request_state(self._spec))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def bytes_besides_pool(self, bucket: Bucket) -> int:
        """What the device must hold besides weights and pool: request state, temporaries and results of one step.

        Two results, as a step is launched before the last one is read. Compiles the step; for sizing, before warm-up.
        """
        program = compile_program(bucket.name, self._lowering(bucket.name))
        return self.state_bytes + program.temp_bytes + 2 * program.result_bytes

    @property
    def num_recompiles(self) -> int:
        """Compilations since warm-up on behalf of launches. 0 unless something is wrong (or steps compile lazily)."""
        return self._counter.num_compilations

    def weights_changed(self) -> bool:
        """Whether a parameter was replaced since the last call. What the old ones computed is stale then."""
        leaves = self._leaves()
        changed = any(seen() is not leaf for seen, leaf in zip(self._seen, leaves, strict=True))
        if changed:
            self._seen = [weakref.ref(leaf) for leaf in leaves]  # weak: the trainer's to free
        return changed

    def recover(self) -> bool:
        """After a failed step: allocate pool and state anew if they went with it, and tell so."""
        try:
            jax.block_until_ready((self._kv_pool, self._state))  # raises if deleted or poisoned
        except Exception:
            self._allocate()
            return True
        return False

    def launch(self, plan: StepPlan) -> Launched:
        """Start the plan's step and return at once."""
        bucket = choose_bucket(self._ready_buckets(), plan)
        packed = pack_step(plan, self._layouts[bucket.name])
        with self._counter.watching():
            for sequence in plan.admissions:
                row = pack_admission(sequence, self._admission, vocab_size=self._spec.vocab_size)
                self._state = self.programs[ADMIT](self._state, row)
            self._kv_pool, self._state, result = self.programs[bucket.name](
                self._leaves(), self._kv_pool, self._state, packed
            )
        return Launched(plan, result)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a launched step and bring its result to the host. Blocks here, and only here."""
        plan, sampled = launched.plan, launched.result.sampled
        steps, rows = plan.num_steps, plan.num_rows
        token_ids = np.asarray(sampled.token_ids)[:steps, :rows]
        wants_top = Feature.TOP_LOGPROBS in plan.features
        width = self._spec.num_top_logprobs if wants_top else 0
        empty = np.zeros((steps, rows, 0))
        return StepResult(
            token_ids=token_ids,
            num_sampled=np.asarray(launched.result.num_sampled)[:rows],
            logprobs=np.asarray(sampled.logprobs)[:steps, :rows],
            ranks=np.asarray(sampled.ranks)[:steps, :rows],
            top_token_ids=np.asarray(sampled.top_token_ids)[:steps, :rows]
            if width
            else empty.astype(np.int32),
            top_logprobs=np.asarray(sampled.top_logprobs)[:steps, :rows]
            if width
            else empty.astype(np.float32),
        )

    def _leaves(self) -> list[jax.Array]:
        return [variable.get_raw_value() for variable in self._variables]

    def _ready_buckets(self) -> tuple[Bucket, ...]:
        if not self._ahead_of_time or len(self.programs.ready) > len(self.buckets):
            return self.buckets
        return tuple(bucket for bucket in self.buckets if bucket.name in self.programs.ready)

    @cached_property
    def _layouts(self):
        spec = self._spec
        return {
            bucket.name: step_layout(
                bucket, block_size=spec.block_size, decode_steps=spec.decode_steps
            )
            for bucket in self.buckets
        }

    @cached_property
    def _admission(self):
        spec = self._spec
        return admission_layout(
            max_model_len=spec.max_model_len,
            num_blocks_per_row=spec.num_blocks_per_row,
            vocab_size=spec.vocab_size,
        )

    def _lowering(self, name: str) -> Lowering:
        """A function that traces and lowers the program of that name."""
        state = abstract_request_state(self._spec)

        def lower_admit():
            packed = jax.ShapeDtypeStruct((self._admission.size,), np.int32)
            return jax.jit(make_admit(self._admission), donate_argnums=0).lower(state, packed)

        def lower_step():
            bucket = next(bucket for bucket in self.buckets if bucket.name == name)
            layout = self._layouts[name]
            step = Step(
                graphdef=self._graphdef,
                treedef=self._treedef,
                bucket=bucket,
                layout=layout,
                spec=self._spec,
            )
            leaves = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self._leaves()
            ]
            packed = jax.ShapeDtypeStruct((layout.size,), np.int32)
            return jax.jit(step, donate_argnums=(1, 2)).lower(
                leaves, self.pool_spec.abstract(), state, packed
            )

        return lower_admit if name == ADMIT else lower_step
