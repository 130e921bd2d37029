"""The border between host and device: owns the KV pool and the request state, launches compiled steps.

What this file knows: buckets, programs, the order in which buffers are donated. What it must never learn: requests'
meaning (the scheduler's), what a layer computes (the model's), how a token is chosen (the sampler's). A feature that
needs the device arrives as a field of the plan or of the request state and a pure function in `step`.

Only the runner holds the pool and the state, and only `launch` replaces them. Steps run on the device in the order
of their launches; the host may reuse a block or a slot as soon as no later plan refers to it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from jaxpage.kv_pool import KVPoolSpec
from jaxpage.plan import BlockTransfers, Feature, StepPlan, StepResult
from jaxpage.runner.buckets import Bucket, fitting_buckets, start_order
from jaxpage.runner.host_memory import HostMemory, padded, portions
from jaxpage.runner.lowering import ADMIT, READ, WRITE, Lowerings
from jaxpage.runner.pack import pack_admission, pack_rows, pack_step
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import CompilationCounter, Programs
from jaxpage.runner.step import DeviceResult, StepSpec, allocate_request_state


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
        host_memory: HostMemory | None = None,
        store: ProgramStore | None = None,
    ):
        self._spec = step_spec
        self.groups = step_spec.groups
        self.pool_spec = pool_spec
        self.buckets = buckets
        self._lowerings = Lowerings(
            model,
            buckets=buckets,
            pool_spec=pool_spec,
            step_spec=step_spec,
            moves_blocks=host_memory is not None,
        )
        # The live variables themselves, in the order of their arrays in programs: looked up anew at each launch.
        self._variables = [variable for _, variable in nnx.to_flat_state(nnx.state(model))]
        self._seen = [weakref.ref(leaf) for leaf in self._leaves()]
        self._ahead_of_time = ahead_of_time
        self.host_memory = host_memory
        self._counter = CompilationCounter()
        self.programs = Programs(self._lowerings.programs, store)

    def warmup(self) -> None:
        """Allocate pool and state, and compile what a first prompt needs; the rest follows behind. Call once.

        Compiles nothing if not `ahead_of_time`: each program at its first use then.
        """
        if not self._ahead_of_time:
            self._allocate()
            return
        first, then = start_order(self.buckets)
        moving = [READ, WRITE] if self.host_memory is not None else []
        self.programs.start([ADMIT, *first, *then, *moving])
        self._allocate()
        self.programs.wait_for([[ADMIT, *first]])

    def _allocate(self) -> None:
        self._kv_pool = self.pool_spec.allocate()
        self._state = allocate_request_state(self._spec)
        jax.block_until_ready((self._kv_pool, self._state))

    def wait_until_warm(self) -> None:
        """Until every program is compiled. Raises what the compiler raised."""
        self.programs.wait()

    @property
    def state_bytes(self) -> int:
        """Bytes of the request state."""
        return self._lowerings.state_bytes

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
        """Start the plan's step and return at once, unless no program that can run it has been compiled yet."""
        bucket = self._choose(plan)
        packed = pack_step(plan, self._lowerings.layouts[bucket.name])
        programs, leaves = self.programs, self._leaves()
        with self._counter.watching():
            if plan.moves is not None:
                self._move(plan.moves)
            for sequence in plan.admissions:
                row = pack_admission(
                    sequence, self._lowerings.admission, vocab_size=self._spec.vocab_size
                )
                self._state = programs[ADMIT](self._state, row)
            self._kv_pool, self._state, result = programs[bucket.name](
                leaves, self._kv_pool, self._state, packed
            )
            if not bucket.decode:
                name = bucket.programs(plan.num_rows)[-1]
                rows = pack_rows(plan, self._lowerings.layouts[name])
                self._state, result = programs[name](leaves, self._state, result, rows)
        return Launched(plan, result)

    def _move(self, moves: BlockTransfers) -> None:
        """Block contents between disk, host memory and the pool, in the order that `BlockTransfers` promises."""
        host, programs = self.host_memory, self.programs
        assert host is not None, "moves need host memory"
        for host_id, block_hash in moves.stores:
            if host.store is not None:
                host.store.save(block_hash, host.get(host_id))
        for host_id, content in moves.loads:
            host.put(host_id, content)
        for block_ids, host_ids in portions(moves.swaps_out):
            for host_id, content in zip(
                host_ids, programs[READ](self._kv_pool, padded(block_ids)), strict=False
            ):
                host.put(host_id, content)
        for host_ids, block_ids in portions(moves.swaps_in):
            contents = host.contents(host_ids)
            self._kv_pool = programs[WRITE](self._kv_pool, padded(block_ids), contents)

    def store_blocks(self, device: list[tuple[int, bytes]], host: list[tuple[int, bytes]]) -> None:
        """Write the contents of blocks to the disk: (block of the device or of the host, hash)."""
        memory = self.host_memory
        assert memory is not None and memory.store is not None, "there is no store"
        for host_id, block_hash in host:
            memory.store.save(block_hash, memory.get(host_id))
        for block_ids, hashes in portions(device):
            contents = self.programs[READ](self._kv_pool, padded(block_ids))
            for block_hash, content in zip(hashes, contents, strict=False):  # padding is left over
                memory.store.save(block_hash, [np.asarray(array) for array in content])

    def _choose(self, plan: StepPlan) -> Bucket:
        """The smallest bucket whose programs are ready."""
        fitting = fitting_buckets(self.buckets, plan)
        if not self._ahead_of_time:
            return fitting[0]
        choices = [bucket.programs(plan.num_rows) for bucket in fitting]
        return fitting[self.programs.wait_for(choices)]

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
