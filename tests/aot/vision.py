"""Vision towers at their real widths, with a layer of each kind: Qwen2.5-VL's for two sizes, and Gemma 3's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.aot.contents import exchanges
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot.models import GEMMA_3_4B, QWEN2_5_VL_3B
from tests.aot.program import Program

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1", "h200")
# Name -> config, patches. 16,384 are a picture of 1,792 x 1,792 pixels.
CASES = {
    "qwen2_5_vl-1024": (QWEN2_5_VL_3B, 1024),
    "qwen2_5_vl-16384": (QWEN2_5_VL_3B, 16_384),
    "gemma3-4096": (GEMMA_3_4B, 4096),
}


def programs(target: str) -> Iterator[Program]:
    for name, (config, num_patches) in CASES.items():
        lower = partial(_lower, config, num_patches, target)
        yield Program(name=name, lower=lower, look=_look)


def tower(values: dict[str, Any]) -> Any:
    """An abstract model of a config with few layers in its tower; of Qwen2.5-VL's the second attends within frames."""
    from jaxpage.checkpoint_config import load_hf_config
    from jaxpage.models.registry import build

    few = {"depth": 2, "fullatt_block_indexes": [1], "num_hidden_layers": 2}
    vision = values["vision_config"]
    vision = vision | {name: value for name, value in few.items() if name in vision}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values | {"vision_config": vision}))
        return build(load_hf_config(str(file)), dtype="bfloat16")


def _lower(config: dict[str, Any], num_patches: int, target: str) -> Any:
    import jax
    import numpy as np
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.pictures.border import Picture

    model = tower(config)
    vision = model.config.vision
    side = int(num_patches**0.5)
    picture = Picture(
        patches=np.zeros((num_patches, vision.patch_values), np.float32),
        grid=(1, side, side),
        num_tokens=num_patches // vision.patches_per_token,
        content_hash=b"",
    )
    graphdef, state = nnx.split(model)
    mesh = mesh_of(parse_target(target), 1)
    place = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state, vision.encoder_inputs(picture, num_patches)),
    )
    with jax.set_mesh(mesh):
        return jax.jit(lambda state, inputs: nnx.merge(graphdef, state).visual(**inputs)).lower(
            *arguments
        )


def _look(compiled: Any, log: str) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "exchanges": exchanges(parse(compiled.as_text() or "")),
    }
