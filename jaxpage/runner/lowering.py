"""How each program is traced and lowered, from shapes alone: it needs neither arrays nor the target device.

Knows the arguments of programs: shapes, order, donation, placement. Must not know what a program computes (`step`
does), or when it is compiled (`programs` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpage.draft_model import DraftModel
from jaxpage.kv_pool import KVPool, KVPoolSpec
from jaxpage.models.lora import slot_axis, write_slot
from jaxpage.parallel.sharding import sharding
from jaxpage.runner.buckets import Bucket, draft_name, sample_name, verify_name
from jaxpage.runner.calls import (
    ADMIT,
    BLOCKS_PER_CALL,
    COPY_STATES,
    LOAD_ADAPTER,
    READ,
    SCORE,
    SET_MASKS,
    SET_TOKENS,
    VOCABULARY,
    WRITE,
)
from jaxpage.runner.eagle_drafting import make_drafting
from jaxpage.runner.encoder import abstract_inputs, encode_name
from jaxpage.runner.host_memory import (
    content_shapes,
    content_shardings,
    read_pools,
    write_pools,
)
from jaxpage.runner.kept_rows import words_of
from jaxpage.runner.layout import Layout
from jaxpage.runner.layouts import layouts_of, sample_sizes
from jaxpage.runner.programs import Lowering
from jaxpage.runner.recurrence import make_copy_states, recurrent_axes
from jaxpage.runner.slots import (
    abstract_request_state,
    allocate_request_state,
    make_admit,
    make_set_masks,
    make_set_tokens,
)
from jaxpage.runner.spec import StepSpec
from jaxpage.runner.step import Step
from jaxpage.runner.strict import StrictStep
from jaxpage.runner.structs import one_slot, parameter, platform_of, struct, structs
from jaxpage.sampling.fields import RequestState

# Programs that change the request state alone.
_STATE_CHANGES = {
    ADMIT: make_admit,
    SET_MASKS: make_set_masks,
    SET_TOKENS: make_set_tokens,
    COPY_STATES: make_copy_states,
}

# XLA options by platform, of programs that loop over tokens. TPU: weights are stored in tiles of (8, 128). From TPU7x
# on, XLA would carry 16-bit arrays through a loop in tiles of (16, 128), so that each launch of decode steps would
# begin with a copy of all weights, although its matmuls use tiles of (8, 128). Programs for older TPUs are the same
# with and without this option. GPU: XLA's defaults, which include conditionals, and loops, whatever XLA_FLAGS says. So
# the loop over decode steps is one CUDA graph. Otherwise the host reads its condition before each step and launches
# the kernels of each layer in turn: 0.7 ms of a step of 3.4 ms (3B, H200).
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
_LOOP_OPTIONS = {
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
    "gpu": {"xla_gpu_enable_command_buffer": _GRAPHS},
}


class FeaturePrograms(NamedTuple):
    """Names of programs that only some engines have."""

    drafters: tuple[str, ...]
    verifiers: tuple[str, ...]
    encoders: tuple[str, ...]


class Lowerings:
    """The programs of an engine: `programs` by name, and the uploads of each, `layouts` and `embeds`.

    `model`: an NNX module with arrays or `jax.ShapeDtypeStruct`s as parameters. Without a `mesh`, programs are for the
    device that holds the arrays; with one, for its devices, which may be those of a compile-only topology. With a
    `draft_model`, its parameters follow those of the model in each program.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        buckets: tuple[Bucket, ...],
        pool_spec: KVPoolSpec,
        step_spec: StepSpec,
        moves_blocks: bool,
        mesh: Mesh | None,
        draft_model: DraftModel | None = None,
    ):
        graphdef, state = nnx.split(model)
        make_step = StrictStep if step_spec.strict else Step
        self._step = make_step(
            graphdef=graphdef,
            treedef=jax.tree.structure(state),
            spec=step_spec,
            pool_spec=pool_spec,
            mesh=mesh,
            drafting=draft_model and make_drafting(model, draft_model, step_spec, mesh),
        )
        models = [model] if draft_model is None else [model, draft_model.model]
        # All parameters, in the order in which programs take them.
        self.variables = [v for each in models for _, v in nnx.to_flat_state(nnx.state(each))]
        self._leaves = [parameter(variable, mesh) for variable in self.variables]
        self._pools = (pool_spec, *([draft_model.pool] if draft_model else []))
        self._pool = [
            x for pool in self._pools for x in structs(pool.abstract(), mesh, pool.axes_of)
        ]
        axes = recurrent_axes(step_spec.recurrent, 1 if mesh is None else mesh.size)
        self._state = {
            name: struct(x, mesh and sharding(mesh, axes.get(name, ()), x.shape))
            for name, x in abstract_request_state(step_spec).items()
        }
        self.spec, self.buckets, self._mesh = step_spec, buckets, mesh
        self.layouts = layouts_of(step_spec, buckets)
        # By `forward` program: the uploads of a step with embeddings.
        self.embeds: dict[str, tuple[jax.ShapeDtypeStruct, ...]] = {
            b.name: self._embeds(b.num_tokens) for b in buckets if not b.decode
        }
        self._no_embeds: dict[str, tuple[jax.Array, ...]] = {}
        self.programs: dict[str, Lowering] = {
            name: partial(self._lower_change, make(self.layouts[name]), self.layouts[name])
            for name, make in _STATE_CHANGES.items()
            if name in self.layouts
        }
        for bucket in buckets:
            self.programs[bucket.name] = partial(self._lower_step, bucket)
        for rows in sample_sizes(buckets):
            self.programs[sample_name(rows)] = partial(self._lower_sample, rows)
        self.of_features = self._add_features()
        self.programs |= {SCORE: self._lower_score, VOCABULARY: self._lower_vocabulary}
        if any(axis is not None for axis in self._slot_axes):
            self.programs[LOAD_ADAPTER] = self._lower_load_adapter
        if moves_blocks:
            self.programs |= {READ: self._lower_read, WRITE: self._lower_write}

    def _add_features(self) -> FeaturePrograms:
        spec, row_sizes = self.spec, sample_sizes(self.buckets)
        drafters = {
            draft_name(rows): partial(self._lower_draft, rows)
            for rows in row_sizes
            if spec.has_draft_model
        }
        verifiers = {
            verify_name(rows): partial(self._lower_verify, rows)
            for rows in row_sizes
            if spec.num_drafts
        }
        picture_sizes = () if spec.pictures is None else spec.pictures.sizes
        encoders = {encode_name(n): partial(self._lower_encode, n) for n in picture_sizes}
        self.programs |= drafters | verifiers | encoders
        return FeaturePrograms(tuple(drafters), tuple(verifiers), tuple(encoders))

    @property
    def pool_spec(self) -> KVPoolSpec:
        """Of the model's pool."""
        return self._pools[0]

    @property
    def _platform(self) -> str:
        return platform_of(self._leaves)

    @property
    def _slot_axes(self) -> list[int | None]:
        return [slot_axis(variable) for variable in self.variables]

    @property
    def state_bytes(self) -> int:
        """Bytes of the request state on one device."""
        shares = [
            x
            if x.sharding is None
            else jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
            for x in self._state.values()
        ]
        return num_bytes(shares)

    def allocate(self) -> tuple[KVPool, RequestState]:
        """Allocate the pool and the request state, with zeros and fill values, where the programs expect them.

        Only the first call compiles anything: one program, since each shape would have one of its own.
        """
        return self._make()

    @cached_property
    def _make(self) -> Callable[[], tuple[KVPool, RequestState]]:
        def make() -> tuple[KVPool, RequestState]:
            pool = [array for spec in self._pools for array in spec.allocate()]
            return pool, allocate_request_state(self.spec)

        if self._mesh is None:
            return jax.jit(make)
        shardings = jax.tree.map(lambda struct: struct.sharding, (self._pool, self._state))
        return jax.jit(make, out_shardings=shardings)

    def no_embeds(self, name: str) -> tuple[jax.Array, ...]:
        """The arguments of a `forward` program in a step without embeddings, already on the device."""
        if name not in self._no_embeds:
            arrays = [np.zeros(x.shape, x.dtype) for x in self.embeds[name]]
            shardings = [x.sharding for x in self.embeds[name]]
            if self._mesh is not None and self._mesh.is_multi_process:
                # `device_put` to devices of other hosts would first compare the array with theirs.
                self._no_embeds[name] = tuple(
                    jax.make_array_from_callback(array.shape, each, array.__getitem__)
                    for array, each in zip(arrays, shardings, strict=True)
                )
            else:
                self._no_embeds[name] = tuple(jax.device_put(arrays, shardings))
        return self._no_embeds[name]

    def _embeds(self, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        if not self.spec.prompt_embeds:
            return ()
        words = jax.ShapeDtypeStruct((num_tokens, self.spec.hidden_size), words_of(self.spec.dtype))
        where = jax.ShapeDtypeStruct((num_tokens,), np.bool_)
        return tuple(structs([words, where], self._mesh))

    def _lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        layout = self.layouts[bucket.name]
        step, options = self._step.forward, None
        if bucket.decode:
            step, options = self._step.decode, _LOOP_OPTIONS.get(self._platform)
        program = partial(step, bucket, layout)
        results = self._out_shardings(self._pool, self._state, None)
        return jax.jit(program, donate_argnums=(1, 2), compiler_options=options, **results).lower(
            self._leaves,
            self._pool,
            self._state,
            self._integers(layout.size),
            *self.embeds.get(bucket.name, ()),
        )

    def _lower_sample(self, num_rows: int) -> jax.stages.Lowered:
        layout = self.layouts[sample_name(num_rows)]
        results = self._out_shardings(self._state, None)
        return jax.jit(partial(self._step.sample, layout), donate_argnums=1, **results).lower(
            self._leaves, self._state, self._integers(layout.size)
        )

    def _lower_verify(self, num_rows: int) -> jax.stages.Lowered:
        layout = self.layouts[verify_name(num_rows)]
        options = _LOOP_OPTIONS.get(self._platform)
        results = self._out_shardings(self._state, None)
        program = partial(self._step.verify, layout)
        return jax.jit(program, donate_argnums=1, compiler_options=options, **results).lower(
            self._leaves, self._state, self._integers(layout.size)
        )

    def _lower_draft(self, num_rows: int) -> jax.stages.Lowered:
        layout = self.layouts[draft_name(num_rows)]
        options = _LOOP_OPTIONS.get(self._platform)
        results = self._out_shardings(self._pool, self._state)
        program = partial(self._step.draft, layout)
        return jax.jit(program, donate_argnums=(1, 2), compiler_options=options, **results).lower(
            self._leaves, self._pool, self._state, self._integers(layout.size)
        )

    def _lower_encode(self, size: int) -> jax.stages.Lowered:
        pictures = self.spec.pictures
        assert pictures is not None
        inputs = abstract_inputs(pictures.vision, size)
        program = partial(self._step.encode, tuple(inputs))
        return jax.jit(program, donate_argnums=1, **self._out_shardings(self._state)).lower(
            self._leaves,
            self._state,
            self._integers(size // pictures.vision.patches_per_token),
            *structs(list(inputs.values()), self._mesh),
        )

    def _lower_score(self) -> jax.stages.Lowered:
        piece = jax.ShapeDtypeStruct((self.spec.num_scored, self.spec.hidden_size), self.spec.dtype)
        layout = self.layouts[SCORE]
        return jax.jit(partial(self._step.score, layout), **self._out_shardings(None)).lower(
            self._leaves, structs(piece, self._mesh), self._integers(layout.size)
        )

    def _lower_vocabulary(self) -> jax.stages.Lowered:
        layout = self.layouts[VOCABULARY]
        return jax.jit(partial(self._step.vocabulary, layout), **self._out_shardings(None)).lower(
            self._leaves, self._state, self._integers(layout.size)
        )

    def _lower_change(self, change: Callable, layout: Layout) -> jax.stages.Lowered:
        """Lower a program that changes only the request state."""
        results = self._out_shardings(self._state)
        return jax.jit(change, donate_argnums=0, **results).lower(
            self._state, self._integers(layout.size)
        )

    def _lower_load_adapter(self) -> jax.stages.Lowered:
        found = [
            (x, axis)
            for x, axis in zip(self._leaves, self._slot_axes, strict=True)
            if axis is not None
        ]
        weights, axes = [x for x, _ in found], tuple(axis for _, axis in found)
        contents = [one_slot(x, axis, self.spec.num_adapters) for x, axis in found]
        slot = jax.ShapeDtypeStruct((), np.int32)
        write = partial(write_slot, axes=axes)
        return jax.jit(write, donate_argnums=0, **self._out_shardings(weights)).lower(
            weights, *structs((slot, contents), self._mesh)
        )

    def _lower_read(self) -> jax.stages.Lowered:
        read = partial(read_pools, self._pools, self._mesh)
        results = self._out_shardings([self._content] * BLOCKS_PER_CALL)
        return jax.jit(read, **results).lower(self._pool, self._integers(BLOCKS_PER_CALL))

    def _lower_write(self) -> jax.stages.Lowered:
        ids, contents = self._integers(BLOCKS_PER_CALL), [self._content] * BLOCKS_PER_CALL
        write = partial(write_pools, self._pools, self._mesh)
        results = self._out_shardings(self._pool)
        return jax.jit(write, donate_argnums=0, **results).lower(self._pool, ids, contents)

    @property
    def _content(self) -> list[jax.ShapeDtypeStruct]:
        """The content of one block, as it leaves the device and comes back."""
        shapes = [x for pool in self._pools for x in content_shapes(pool)]
        if self._mesh is None:
            return shapes
        shardings = [x for pool in self._pools for x in content_shardings(pool, self._mesh)]
        return [struct(x, each) for x, each in zip(shapes, shardings, strict=True)]

    def _out_shardings(self, *results: Any) -> dict[str, Any]:
        """Output shardings, as an option of `jax.jit`; a result None is replicated on every device of the mesh."""
        if self._mesh is None or self._mesh.size == 1:
            return {}
        replicated = sharding(self._mesh)
        found = [
            replicated if x is None else jax.tree.map(lambda s: s.sharding, x) for x in results
        ]
        return {"out_shardings": tuple(found) if len(found) > 1 else found[0]}

    def _integers(self, size: int) -> jax.ShapeDtypeStruct:
        (integers,) = structs([jax.ShapeDtypeStruct((size,), np.int32)], self._mesh)
        return integers

    def layers_of(self, bucket: Bucket) -> jax.stages.Lowered:
        """One pass through the layers of a decode step, without its loop and sampler. No engine runs it; it compiles in
        a fraction of the time, and shows what the layers need.
        """
        layout = self.layouts[bucket.name]
        layers = partial(self._step.forward, bucket, layout)
        options = _LOOP_OPTIONS.get(self._platform)
        return jax.jit(layers, donate_argnums=(1, 2), compiler_options=options).lower(
            self._leaves, self._pool, self._state, self._integers(layout.size)
        )


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of their `jax.ShapeDtypeStruct`s."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
