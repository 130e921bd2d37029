"""Which kernels serve the weights of a model, on one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxpage.device import Device
from jaxpage.models.decoder import CausalLM
from jaxpage.models.lora import attach_adapters
from jaxpage.ops import embedding, experts, lora, matmul
from jaxpage.ops.implementations import Choice
from jaxpage.parallel.sharding import sharding
from jaxpage.weights.transform import (
    choose_experts,
    choose_lookups,
    choose_products,
    choose_quantized_products,
    join_projections,
    quantize,
)


class Kernels(NamedTuple):
    """Those of a device, or of each device of a mesh."""

    hardware: Device
    mesh: Mesh | None
    dtype: DTypeLike  # of activations

    def transform(
        self, model: CausalLM, quantization: str | None, *, rounds: bool, join: bool, floats: bool
    ) -> set[str]:
        """Join a model's parameters in place, arrays or shapes, round them if `rounds`, and choose kernels for them;
        for weights of floats if `floats`.

        Returns lines that say which products run in plain XLA although a kernel exists, and why.
        """
        lines = set[str]()

        def note(what: str, reasons: set[str]) -> None:
            lines.update(f"{what} run in plain XLA: {reason}" for reason in reasons)

        if join and self._num_devices == 1:  # a joined weight cannot be divided evenly
            # XLA on TPUs would copy the parts of recurrent layers' results, which do not go into one kernel.
            join_projections(model, recurrent=self.hardware.platform != "tpu")
        if rounds and quantization is not None:
            note(f"{quantization} products", quantize(model, quantization, self.of_matmul))
        else:
            reasons = choose_quantized_products(model, self.of_matmul)
            note(f"{quantization} products", reasons)
        if floats:
            choose_products(model, self.of_matmul)
            choose_lookups(model, self.of_embedding)
        note("experts", choose_experts(model, self.of_experts))
        return lines

    def attach_adapters(self, model: CausalLM, *, num_slots: int, rank: int) -> set[str]:
        """Add parameters for adapters, and choose kernels for them. Returns lines as `transform` does."""

        def choose(a: lora.Half, b: Sequence[lora.Half]) -> Choice[lora.LoraKernel]:
            options = {"num_slots": num_slots, "num_devices": self._num_devices}
            return lora.choose(a, b, self.hardware, **options)

        sizes = {"num_slots": num_slots, "rank": rank}
        reasons = attach_adapters(model, **sizes, mesh=self.mesh, choose=choose)
        return {f"adapters run in plain XLA: {reason}" for reason in reasons}

    def of_matmul(
        self, weight: matmul.Weight, axes: tuple[str, ...], units: tuple[int, ...]
    ) -> Choice[matmul.MatmulKernel]:
        """The kernel for a weight, whose axes `parallel.sharding` knows."""
        mesh, spec = self._where(axes, units)
        return matmul.choose(weight, self.hardware, mesh=mesh, spec=spec, dtype=self.dtype)

    def of_embedding(
        self, table: Any, axes: tuple[str, ...], units: tuple[int, ...]
    ) -> Choice[embedding.LookupKernel]:
        """The kernel for lookups in a table, whose axes `parallel.sharding` knows."""
        mesh, spec = self._where(axes, units)
        return embedding.choose(table, self.hardware, mesh=mesh, spec=spec)

    def _where(
        self, axes: tuple[str, ...], units: tuple[int, ...]
    ) -> tuple[Mesh | None, PartitionSpec]:
        """How an array is sharded; no mesh: it is on one device."""
        if self.mesh is None or self._num_devices == 1:
            return None, PartitionSpec()
        where = sharding(self.mesh, axes, units)
        assert isinstance(where, NamedSharding)
        return self.mesh, where.spec

    def of_experts(
        self, gate_up: experts.Weights, down: experts.Weights
    ) -> Choice[experts.ExpertsKernel]:
        """The kernel for a mixture of experts with these weights."""
        mesh, num_experts = self.mesh if self._num_devices > 1 else None, gate_up.shape[0]
        divided = mesh is not None and num_experts % mesh.size == 0

        def share(array: Any) -> jax.ShapeDtypeStruct:
            of_device = num_experts // self._num_devices if divided else num_experts
            return jax.ShapeDtypeStruct((of_device, *array.shape[1:]), array.dtype)

        return experts.choose(
            jax.tree.map(share, gate_up),
            jax.tree.map(share, down),
            self.hardware,
            mesh=mesh,
            divided=divided,
            dtype=self.dtype,
        )

    @property
    def _num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size
