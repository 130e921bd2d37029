"""The border between host and device: owns the KV pool and the request state, and executes calls.

Knows programs, the arguments they take, and which of these are donated. Must not know what a request means (the
scheduler does), what a layer computes (the model does), or how a token is chosen (the sampler does). A feature that
needs the device arrives as a field of the plan or a slot field, and a pure function.

Only the runner holds the pool and the state, and only `execute` replaces them. Programs run on the device in the order
of their launches, so the host may reuse a block or a slot as soon as no later plan refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxpage.array_form import form_of, in_words, is_elsewhere
from jaxpage.kv_groups import KVGroups
from jaxpage.models.lora import slot_axis
from jaxpage.plan import DeletedParameterError, StepPlan, StepResult, UnfitParameterError
from jaxpage.runner import calls
from jaxpage.runner.buckets import Bucket, StepPrograms, fitting_programs, start_order
from jaxpage.runner.calls import Call
from jaxpage.runner.host_memory import HostMemory
from jaxpage.runner.launched import Executed, Launched, to_host
from jaxpage.runner.lowering import Lowerings
from jaxpage.runner.other_hosts import OtherHosts
from jaxpage.runner.pack import pack, pack_stores, padded, unpack_stores
from jaxpage.runner.program_store import ProgramStore
from jaxpage.runner.programs import CompilationCounter, Programs
from jaxpage.runner.recording import CallRecorder
from jaxpage.runner.step_result import DeviceResult, split_pieces
from jaxpage.sampling.features import bits
from jaxpage.sampling.logprobs import TOP_LOGPROBS, Scores


class Runner:
    """Runs the plans of one engine on one model.

    `lowerings`: of a model that holds arrays. Its parameters are read at each launch, so the owner of the model (a
    trainer, for example) may replace them between steps.
    """

    def __init__(
        self,
        lowerings: Lowerings,
        *,
        ahead_of_time: bool = True,
        host_memory: HostMemory | None = None,
        store: ProgramStore | None = None,
    ):
        self._lowerings, self._spec = lowerings, lowerings.spec
        self.pool_spec = lowerings.pool_spec
        self.read_from(lowerings.variables)
        self._seen = [_reference(leaf) for leaf in self._leaves()]
        self._ahead_of_time = ahead_of_time
        self.host_memory = host_memory
        self.recorder: CallRecorder | None = None  # once set, it records all calls
        self.other_hosts: OtherHosts | None = None  # they execute all calls too; set after `warmup`
        self._num_executed = 0
        self._counter = CompilationCounter()
        self.programs = Programs(self._lowerings.programs, store)
        self._buckets = {bucket.name: bucket for bucket in lowerings.buckets}

    def warmup(self) -> None:
        """Allocate pool and state, and compile what a first prompt needs; the rest compiles in the background.

        Call it once. Unless `ahead_of_time`, it compiles nothing: each program compiles at its first use.
        """
        if not self._ahead_of_time:
            self._allocate()
            return
        first, then = start_order(self.buckets)
        moving = [calls.READ, calls.WRITE] if self.host_memory is not None else []
        small = [calls.ADMIT, calls.SET_MASKS, calls.SET_TOKENS]
        small += [calls.LOAD_ADAPTER] if self._spec.num_adapters else []
        small += [calls.COPY_STATES] if self._spec.num_cached_states else []
        # The second token of a prompt may already have drafts.
        features = self._lowerings.of_features
        then = [*features.drafters, *features.verifiers, *then, *features.encoders]
        self.programs.start([*small, *first, *then, *moving, calls.SCORE, calls.VOCABULARY])
        self._allocate()
        self.programs.wait_for([[calls.ADMIT, *first]])

    def wait_until_warm(self) -> None:
        """Wait until every program is compiled. Raises what the compiler raised."""
        self.programs.wait()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The padded sizes of steps."""
        return tuple(self._buckets.values())

    @property
    def groups(self) -> KVGroups:
        """The KV-cache groups of the model's layers."""
        return self._spec.groups

    @property
    def num_recompiles(self) -> int:
        """Compilations during launches since warm-up. 0 unless something is wrong (or programs compile lazily)."""
        return self._counter.num_compilations

    def read_from(self, variables: Iterable[nnx.Variable]) -> None:
        """Read parameters from these variables from the next launch on, in the order in which programs take them, and
        in the form in which they take them.
        """
        self._parameters = [_Parameter(each, form_of(each.get_raw_value())) for each in variables]

    def weights_changed(self) -> bool:
        """Whether a parameter was replaced since the last call, which makes KV of the old parameters stale."""
        leaves = self._leaves()
        changed = any(seen() is not leaf for seen, leaf in zip(self._seen, leaves, strict=True))
        if changed:
            if self.other_hosts is not None:
                raise RuntimeError(
                    "parameters were replaced on one host of several; the others have the old ones"
                )
            self._seen = [_reference(leaf) for leaf in leaves]
            if self.recorder is not None:
                self.recorder.weights_changed()
        return changed

    def weights_moved(self) -> None:
        """Parameters were moved to other arrays with the same values, so their KV is not stale."""
        self._seen = [_reference(leaf) for leaf in self._leaves()]

    def recover(self) -> bool:
        """After a failed step, reallocate pool and state if it destroyed them; returns whether it did. With several
        hosts a failed step ends the engine on all of them, and this does nothing.
        """
        if self.other_hosts is not None:
            return False
        try:
            jax.block_until_ready((self._kv_pool, self._state))  # raises if deleted or poisoned
        except Exception:
            self.execute([Call(calls.RESET)])
            return True
        return False

    def free_pool(self) -> None:
        """Free the memory of the KV pool; its contents are lost, and `recover` allocates a new one."""
        for array in jax.tree.leaves(self._kv_pool):
            array.delete()

    def launch(self, plan: StepPlan) -> Launched:
        """Launch the plan's step and return at once, unless it must wait for a program to be compiled."""
        programs = self._choose(plan)
        step = pack(plan, programs, self._lowerings.layouts, self._spec.pictures)
        try:
            result = self.execute(step)
        except Exception as error:
            self._check_parameters(error)
            raise
        assert result.sampled is not None, "a step ends with decode or sample"
        return Launched(
            1 + self._spec.num_drafts if plan.num_drafts else plan.num_steps,
            plan.num_rows,
            bool(plan.features & bits(TOP_LOGPROBS)) and self._spec.num_top_logprobs > 0,
            result,
            number=self._num_executed - 1,
            program=programs.names[0],
            fill=programs.fill(plan),
        )

    def execute(self, given: Iterable[Call]) -> Executed:
        """Run calls in order. Returns their results, which may still be computing."""
        given = list(given)
        if self.recorder is not None:
            self.recorder.calls(given)
        self._num_executed += 1
        sampled, executed = None, Executed()
        hidden: list[jax.Array] = []  # pieces, from `forward`
        captured: list[jax.Array] = []  # pieces, from `forward`, or a single one from `decode`
        with self._counter.watching(), self._everywhere(given):
            for call in given:
                self.programs.num_calls[call.program] += 1
                if call.program == calls.SCORE:
                    executed.scores.append(self._score(hidden, *call.buffers))
                elif call.program == calls.VOCABULARY:
                    executed.vocabulary.append(self._vocabulary(*call.buffers))
                elif call.program == calls.CAPTURE:
                    piece, rows = call.buffers
                    executed.captured.append((rows, captured[int(piece)]))
                else:
                    result = self._run(call.program, *call.buffers)
                    if isinstance(result, DeviceResult):
                        sampled = result
                        if result.captured is not None:
                            captured = [result.captured]
                    elif result is not None:
                        hidden, captured = split_pieces(result, self._spec)
        return replace(executed, sampled=sampled)

    def store_blocks(self, device: list[tuple[int, bytes]], host: list[tuple[int, bytes]]) -> None:
        """Write the contents of blocks to disk: pairs of (device or host block, hash)."""
        self.execute(pack_stores(device, host))

    def is_done(self, launched: Launched) -> bool:
        """Whether the device has computed all that `collect` reads."""
        return all(array.is_ready() for array in launched.result.arrays())

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a launched step and copy its result to the host. The only method that waits for the device."""
        with self._computed(launched.result):
            result = to_host(launched)
        if self.recorder is not None:
            self.recorder.result(launched.number, result)
        return result

    def _everywhere(self, given: list[Call]) -> AbstractContextManager[None]:
        return nullcontext() if self.other_hosts is None else self.other_hosts.executing(given)

    def _computed(self, result: Executed) -> AbstractContextManager[None]:
        if self.other_hosts is None:
            return nullcontext()
        return self.other_hosts.reading(result.arrays())

    def _choose(self, plan: StepPlan) -> StepPrograms:
        """The smallest programs that fit the plan and are compiled."""
        fitting = fitting_programs(self.buckets, plan)
        if not self._ahead_of_time:
            return fitting[0]
        return fitting[self.programs.wait_for([programs.names for programs in fitting])]

    def _run(self, name: str, *buffers: np.ndarray) -> DeviceResult | list[jax.Array] | None:
        """Run one call: add the other arguments of its program, and keep the new pool and state. Returns what was
        sampled, or the pieces of a `forward`.
        """
        if name in _METHODS:
            _METHODS[name](self, *buffers)
            return None
        program = self.programs[name]
        if name in calls.STATE_CHANGES:
            self._state = program(self._state, *buffers)
            return None
        leaves, bucket = self._leaves(), self._buckets.get(name)
        if name in self._lowerings.of_features.encoders:
            self._state = program(leaves, self._state, *buffers)
            return None
        if name in self._lowerings.of_features.drafters:
            self._kv_pool, self._state = program(leaves, self._kv_pool, self._state, *buffers)
            return None
        if bucket is None:
            self._state, result = program(leaves, self._state, *buffers)
            return result
        if bucket.decode:
            self._kv_pool, self._state, result = program(
                leaves, self._kv_pool, self._state, *buffers
            )
            return result
        packed, *embeds = buffers
        if self._spec.prompt_embeds and not embeds:
            embeds = self._lowerings.no_embeds(name)
        self._kv_pool, self._state, hidden = program(
            leaves, self._kv_pool, self._state, packed, *embeds
        )
        return hidden

    def _score(
        self, hidden: list[jax.Array], piece: np.ndarray, packed: np.ndarray
    ) -> tuple[int, bool, Scores]:
        layout = self._lowerings.layouts[calls.SCORE]
        num, whole = int(layout.view(packed, "num")), bool(layout.view(packed, "whole"))
        program = self.programs[calls.SCORE]
        return num, whole, program(self._leaves(), hidden[int(piece)], packed)

    def _vocabulary(self, packed: np.ndarray) -> tuple[int, jax.Array]:
        num = int(self._lowerings.layouts[calls.VOCABULARY].view(packed, "num"))
        return num, self.programs[calls.VOCABULARY](self._leaves(), self._state, packed)

    def _allocate(self) -> None:
        self._kv_pool, self._state = self._lowerings.allocate()
        jax.block_until_ready((self._kv_pool, self._state))

    @property
    def _memory(self) -> HostMemory:
        assert self.host_memory is not None, "blocks that leave the device need host memory"
        return self.host_memory

    def _swap_out(self, block_ids: np.ndarray, host_ids: np.ndarray) -> None:
        contents = self.programs[calls.READ](self._kv_pool, block_ids)
        for host_id, content in zip(host_ids.tolist(), contents, strict=False):
            self._memory.put(host_id, content)

    def _swap_in(self, host_ids: np.ndarray, block_ids: np.ndarray) -> None:
        contents = self._memory.contents(host_ids.tolist())
        self._kv_pool = self.programs[calls.WRITE](self._kv_pool, block_ids, contents)

    def _load(self, host_id: np.ndarray, *content: np.ndarray) -> None:
        self._memory.put(int(host_id), list(content))

    def _store_host(self, host_ids: np.ndarray, hashes: np.ndarray) -> None:
        for host_id, block_hash in unpack_stores(host_ids, hashes):
            self._memory.save(block_hash, self._memory.get(host_id))

    def _store_device(self, block_ids: np.ndarray, hashes: np.ndarray) -> None:
        stored = unpack_stores(block_ids, hashes)
        ids = padded([block_id for block_id, _ in stored])
        contents = self.programs[calls.READ](self._kv_pool, ids)
        for (_, block_hash), content in zip(stored, contents, strict=False):
            self._memory.save(block_hash, [np.asarray(array) for array in content])

    def _load_adapter(self, slot: np.ndarray, *contents: np.ndarray) -> None:
        variables = [each.variable for each in self._parameters]
        found = [i for i, v in enumerate(variables) if slot_axis(v) is not None]
        old = [variables[i].get_raw_value() for i in found]
        new = self.programs[calls.LOAD_ADAPTER](old, slot, list(contents))
        for i, array in zip(found, new, strict=True):
            variables[i].set_raw_value(array)
            self._seen[i] = weakref.ref(array)  # the base model's weights have not changed

    def _check_parameters(self, error: Exception) -> None:
        """Raise a ParameterError if the parameters are the reason for an error."""
        for variable, form in self._parameters:
            leaf = variable.get_raw_value()
            # None: its transfer to the device failed.
            if leaf is None or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
                raise DeletedParameterError from error
            if (leaf.dtype, leaf.shape) != (form.dtype, form.shape):
                raise UnfitParameterError(in_words(leaf), in_words(form)) from error
            if is_elsewhere(leaf, form.sharding):
                raise UnfitParameterError(leaf.sharding, form.sharding) from error

    def _leaves(self) -> list[jax.Array]:
        return [each.variable.get_raw_value() for each in self._parameters]


# Calls that a method executes; they have no result.
_METHODS = {
    calls.STORE_HOST: Runner._store_host,
    calls.STORE_DEVICE: Runner._store_device,
    calls.LOAD: Runner._load,
    calls.SWAP_OUT: Runner._swap_out,
    calls.SWAP_IN: Runner._swap_in,
    calls.RESET: Runner._allocate,
    calls.LOAD_ADAPTER: Runner._load_adapter,
}


class _Parameter(NamedTuple):
    variable: nnx.Variable
    form: jax.ShapeDtypeStruct  # that programs were compiled for


def _reference(leaf: Any) -> Callable[[], Any]:
    """A weak reference, so that the owner can free the array. A mere shape is never replaced, so it counts as None."""
    return weakref.ref(leaf) if isinstance(leaf, jax.Array) else lambda: None
