"""What restoring an Orbax checkpoint to several devices takes: `python -m tests.weights.restore_memory JSON`, of `Run`.

It prints bytes as JSON. Devices of a CPU are in host memory, so what they hold is part of every figure.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  # its import is not measured
from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import build
from jaxpage.weights.load import load
from jaxpage.weights.spec import specs, variables


@dataclass(frozen=True, kw_only=True)
class Run:
    """`reads_whole`: all weights to one device first, and from there to the mesh, which takes their size besides."""

    checkpoint: str
    config: str
    num_devices: int
    reads_whole: bool = False


def measure(run: Run) -> dict[str, int]:
    """stored: of the weights; held: by all devices together; peak and after: of this process, since before."""
    mesh = Mesh(np.array(jax.devices()[: run.num_devices]), ("tensor",))
    model = build(load_hf_config(run.config), dtype="bfloat16")
    jax.block_until_ready([jax.device_put(1, device) for device in mesh.devices.flat])
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    if run.reads_whole:
        _load_whole(model, run.checkpoint, mesh)
    else:
        load(model, run.checkpoint, mesh=mesh, use_tqdm=False)
    peak, after = _memory("VmHWM"), _memory("VmRSS")
    arrays = [variable.get_value() for variable in variables(model).values()]
    return {
        "stored": sum(array.nbytes for array in arrays),
        "held": sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards),
        "peak": peak - before,
        "after": after - before,
    }


def _load_whole(model: CausalLM, checkpoint: str, mesh: Mesh) -> None:
    load(model, checkpoint, use_tqdm=False)
    whole = {path: variable.get_value() for path, variable in variables(model).items()}
    shared = {
        path: jax.device_put(whole[path], spec.sharding(mesh))
        for path, spec in specs(model).items()
    }
    for path, array in jax.block_until_ready(shared).items():
        variables(model)[path].set_value(array)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    print(json.dumps(measure(Run(**json.loads(sys.argv[1])))))
