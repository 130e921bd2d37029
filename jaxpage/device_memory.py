"""The device memory of one engine, its parameters and KV pool: freed for a while, and parameters replaced.

Adapters do not count as parameters here: they have their own slots. Must not know who asks, and does not pause: whoever
frees memory has made sure that no step runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxpage.engine.engine import Engine
from jaxpage.engine_spec import EngineSpec
from jaxpage.models.decoder import CausalLM
from jaxpage.models.lora import slot_axis
from jaxpage.parallel.sharding import TENSOR
from jaxpage.runner.runner import Runner
from jaxpage.weights.abstract import with_layers
from jaxpage.weights.load import load, quantization_config_in

Arrays = Mapping[str, jax.Array]  # by path in the engine's model

TAGS = ("weights", "kv_cache")  # vLLM's names of the parts


class DeviceMemory:
    """`read` may be called from any thread; all else only from the engine's thread, between two steps."""

    def __init__(self, spec: EngineSpec, engine: Engine, runner: Runner):
        self._spec, self._engine, self._runner = spec, engine, runner
        self._variables = _own_variables(spec.model)
        self._of_drafts: dict[str, nnx.Variable] = {}  # nothing replaces them
        if spec.draft_model is not None:
            found = _own_variables(spec.draft_model.model)
            self._of_drafts = {f"draft_model.{path}": each for path, each in found.items()}
        self._places: dict[str, Sharding] = {
            path: variable.get_raw_value().sharding
            for path, variable in (self._variables | self._of_drafts).items()
        }
        self._has_pool = True
        self._on_host = False  # the parameters
        self._are_lost = False  # the parameters are discarded: only `replace_weights` helps

    @property
    def lacks(self) -> str | None:
        """Why no step can run; None if one can."""
        if self._are_lost:
            return (
                "the weights were discarded, by sleep(level=2) or an update that failed: load some with "
                "update_weights, then wake_up"
            )
        if self._on_host or not self._has_pool:
            return "the engine is asleep: wake_up before generation goes on"
        return None

    @property
    def version(self) -> int:
        """How often the parameters were replaced."""
        return self._engine.scheduler.counters.num_weight_changes

    def read(self, folder: str | Path) -> Arrays:
        """The parameters of a checkpoint, joined and rounded as in the engine, in host memory.

        Safetensors or Orbax, as `weights.load` reads them, for the engine's model. Raises ValueError for a checkpoint
        that does not fit it or is damaged.
        """
        config = replace(self._spec.config, enable_lora=False)
        mesh = Mesh(np.array([_host_device()]), (TENSOR,))
        spec = self._spec
        model = with_layers(spec.hf_config, config, spec.mesh, spec.quantised)
        # Weights alone are quantised as the engine's own.
        hf_config = None if quantization_config_in(folder) else spec.hf_config
        load(model, folder, mesh=mesh, use_tqdm=False, hf_config=hf_config)
        replace(spec, config=config, model=model, draft_model=None).transform_weights()
        return {path: each.get_raw_value() for path, each in _own_variables(model).items()}

    def replace_weights(self, arrays: Arrays, *, keep_cache: bool) -> int:
        """Replace the parameters by those that `read` returned; returns their version. Nothing is compiled.

        Parameters are replaced one at a time. If a transfer fails, they are lost. `keep_cache`: KV computed with
        the old ones stays in the prefix cache.
        """
        assert arrays.keys() == self._variables.keys(), "these are of another model"
        self._are_lost = True
        for path, variable in self._variables.items():
            variable.set_raw_value(None)
            variable.set_raw_value(_put(arrays[path], self._places[path]))
        self._restore(self._of_drafts)
        self._are_lost = self._on_host = False
        return self._engine.notice_weight_changes(keep_cache=keep_cache)

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the KV pool, so that running requests are recomputed later, and the parameters, which move to the host
        or are discarded. Those of a draft model always move to the host.
        """
        if self._has_pool:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._runner.free_pool()
            self._has_pool = False
        moved = list(self._of_drafts.values())
        if keep_weights and not (self._on_host or self._are_lost):
            moved += self._variables.values()
            self._on_host = True
        elif not keep_weights:
            for variable in self._variables.values():
                variable.set_raw_value(None)
            self._on_host, self._are_lost = False, True
        for variable in moved:
            variable.set_raw_value(np.asarray(variable.get_raw_value()))

    def wake_up(self, tags: Collection[str] = TAGS) -> None:
        """Restore the parts in `tags`, unless the parameters were discarded. Nothing is compiled."""
        if "weights" in tags and self._on_host:
            self._restore(self._variables | self._of_drafts)
            self._on_host = False
            self._runner.weights_moved()
        if "kv_cache" in tags and not self._has_pool:
            self._runner.recover()
            self._has_pool = True

    def _restore(self, variables: Mapping[str, nnx.Variable]) -> None:
        """Move parameters from the host to where they belong."""
        for path, variable in variables.items():
            variable.set_raw_value(_put(variable.get_raw_value(), self._places[path]))


def needed(memory: DeviceMemory | None) -> DeviceMemory:
    """Raises ValueError if there is none."""
    if memory is None:
        raise ValueError(
            "weights can be replaced, and an engine can sleep, with one replica on one host: start it without "
            "data_parallel_size and nnodes, or use one engine for each"
        )
    return memory


def check_tags(tags: Collection[str] | None) -> Collection[str]:
    """`TAGS` for None. Raises ValueError for others."""
    unknown = sorted(set(tags or ()) - set(TAGS))
    if unknown:
        raise ValueError(f"tags are of {', '.join(TAGS)}, got {unknown[0]!r}")
    return TAGS if tags is None else tags


def _own_variables(model: CausalLM) -> dict[str, nnx.Variable]:
    """All parameters except those of adapters, with the parts of quantized ones, by path."""
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): v for path, v in state if slot_axis(v) is None}


def _put(array: Any, place: Sharding) -> jax.Array:
    # Waiting keeps transfers, and the host copies that they hold, from accumulating.
    return jax.block_until_ready(jax.device_put(array, place))


def _host_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            f"weights are read into host memory, which needs JAX's CPU backend: {error}. "
            'Set JAX_PLATFORMS to your platform and "cpu", as in JAX_PLATFORMS=tpu,cpu'
        ) from None
