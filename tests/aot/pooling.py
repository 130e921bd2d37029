"""The chunks of long texts in a pooling model: Qwen3-Embedding-0.6B at its real sizes, of few layers.

Of the sizes of texts the shortest and the longest are compiled, of those of tokens the longest.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot.models import QWEN3_EMBEDDING
from tests.aot.program import Program

if TYPE_CHECKING:
    from jaxpage.models.pooling_model import PoolingModel
    from jaxpage.pooling.chunks import Chunks, ChunkSize

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1", "h200")
FEW = 2  # layers
CHUNK = 4096  # tokens


def programs(target: str) -> Iterator[Program]:
    import jax

    from jaxpage.pooling.chunks import lowerings

    with jax.set_mesh(mesh_of(parse_target(target), 1)):
        model, chunks = model_and_chunks(target)
        lower = lowerings(model, chunks)
        shortest, longest = chunks.sizes[0], chunks.sizes[-1]
        for size, per_token in ((shortest, False), (longest, False), (longest, True)):
            name = size.name(per_token=per_token)
            yield Program(
                name=name, lower=lower[name], look=partial(_look, model, chunks, size, per_token)
            )


def model_and_chunks(target: str) -> tuple[PoolingModel, Chunks]:
    from jaxpage.config import EngineConfig
    from jaxpage.device import Device
    from jaxpage.models import pooling_registry
    from jaxpage.pooling.build import sizes_of
    from jaxpage.pooling.choose import read_architecture

    chip = parse_target(target).chip
    device = mesh_of(parse_target(target), 1).devices.flat[0]
    hardware = Device.of(device, memory_bytes=chip.num_bytes)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_EMBEDDING))
        few = {"num_hidden_layers": FEW, "layer_types": None}
        options = EngineConfig.from_options(
            model=folder, hf_overrides=few, runner="pooling", max_num_batched_tokens=CHUNK
        )
        hf_config, found = read_architecture(options)
        config = options.resolve(
            hf_config,
            platform=hardware.platform,
            device_kind=hardware.kind,
            device_memory=hardware.memory_bytes,
        )
    model, _ = pooling_registry.build(
        hf_config, found, dtype=config.dtype, max_model_len=config.max_model_len
    )
    return model, sizes_of(config, model, hardware)[1]


def _look(
    model: PoolingModel, chunks: Chunks, size: ChunkSize, per_token: bool, compiled: Any, log: str
) -> dict[str, Any]:
    import jax

    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    arrays = jax.tree.leaves(chunks.pool_of(size).abstract())
    calls = [name for name, _ in kernel_calls(contents)]
    return {
        "num_tokens": size.num_tokens,
        "longest": size.longest,
        "per_token": per_token,
        "hidden_size": model.config.hidden_size,
        "pool_bytes": sum(each.size * each.dtype.itemsize for each in arrays),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "pool_copies": list(copies_of_size(contents, {each.shape for each in arrays})),
        "attention_calls": sum("paged_attention" in name for name in calls),
        "exchanges": exchanges(contents),
    }
