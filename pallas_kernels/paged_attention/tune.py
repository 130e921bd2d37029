"""Sizes of the paged attention kernel for one kind of device: found by measuring there, kept in `tuned/`, looked up.

`python -m pallas_kernels.paged_attention.tune` measures each candidate on the GPU that is there and writes
`tuned/<device kind>.json`, which `tuned_sizes` reads; a kind without a file has the defaults of `Sizes`. The folder is
empty as long as nobody has measured anything.

Tuned is what changes the speed and, from one kind of device to another, the order of sums. Never tuned is what would
make a result depend on its batch: `gpu_layout.SPLIT`, where the sums of a row are cut, is one number for all. The TPU
kernel has no entry: its tiles follow from the shapes (`tpu_layout.Shape`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu_layout import Sizes, why_not, why_not_on

FOLDER = Path(__file__).parent / "tuned"
RUNS = 15
# heads, KV heads, rows, queries per row, keys per row; head dim 128. Pools of 0.27 GB and more: five times the L2.
DECODE = ((16, 2, 64, 1, 8192), (32, 8, 64, 1, 4096))
PREFILL = ((16, 2, 16, 2048, 16384), (32, 8, 4, 2048, 32768))
# Of each kind of work the sizes that matter to it, so that candidates add up instead of multiplying.
CANDIDATES: tuple[tuple[tuple, dict[str, tuple[int, ...]]], ...] = (
    (DECODE, {"programs_per_sm": (1, 2, 3, 4)}),
    (PREFILL, {"tile_kv": (64, 128), "stages": (2, 3, 4)}),
)


def tuned_sizes(device_kind: str, folder: Path = FOLDER) -> Sizes:
    """What was measured for a kind of device, "NVIDIA H200"; without a measurement the defaults.

    Raises ValueError for a file that says something else than the fields of `Sizes`.
    """
    path = path_of(device_kind, folder)
    if not path.exists():
        return Sizes()
    sizes = json.loads(path.read_text(encoding="utf-8"))["sizes"]
    names = {field.name for field in dataclasses.fields(Sizes)}
    if set(sizes) != names or not all(type(x) is int and x > 0 for x in sizes.values()):
        raise ValueError(f"{path}: sizes are {sizes}; wanted are positive numbers for {names}")
    return Sizes(**sizes)


def write(device_kind: str, sizes: Sizes, seconds: dict[str, float], folder: Path = FOLDER) -> Path:
    """Write what `tuned_sizes` reads. seconds: of each candidate, the median of a call."""
    path = path_of(device_kind, folder)
    path.parent.mkdir(exist_ok=True)
    content = {
        "device_kind": device_kind,
        "jax": jax.__version__,
        "sizes": dataclasses.asdict(sizes),
        "seconds": seconds,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def tune() -> tuple[Sizes, dict[str, float]]:
    """The fastest sizes on the device that is there, and the seconds of all. One that does not compile is left out."""
    best, seconds = Sizes(), {}
    for works, values in CANDIDATES:
        arguments = [_arguments(*work) for work in works]
        times: dict[Sizes, float] = {}
        for chosen in itertools.product(*values.values()):
            sizes = dataclasses.replace(best, **dict(zip(values, chosen, strict=True)))
            name = " ".join(f"{key}={x}" for key, x in zip(values, chosen, strict=True))
            try:
                times[sizes] = sum(_seconds(sizes, *each) for each in arguments)
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            seconds[name] = times[sizes]
            print(f"{name}: {1e3 * times[sizes]:.3f} ms", file=sys.stderr)
        if not times:
            raise RuntimeError("no candidate of these sizes could be run; the reasons stand above")
        best = min(times, key=times.__getitem__)
    return best, seconds


def _arguments(heads: int, kv_heads: int, rows: int, query_len: int, kv_len: int) -> tuple:
    """Arrays of a call, and its options."""
    block_size, head_dim = 64, 128
    width = kv_len // block_size
    keys = iter(jax.random.split(jax.random.key(0), 3))
    shape = (rows * width + 1, block_size, 2 * kv_heads, head_dim)
    table = 1 + jax.random.permutation(next(keys), rows * width).reshape(rows, width)
    arrays = {
        "q": jax.random.normal(next(keys), (rows * query_len, heads, head_dim), jnp.bfloat16),
        "pool": jax.random.normal(next(keys), shape, jnp.bfloat16),
        "block_table": table.astype(jnp.int32),
        "kv_lens": jnp.full(rows, kv_len, jnp.int32),
        "query_starts": jnp.arange(rows + 1, dtype=jnp.int32) * query_len,
    }
    if reason := why_not(arrays["q"], arrays["pool"]):
        raise SystemExit(reason)
    return arrays, {"scale": head_dim**-0.5, "one_query_per_row": query_len == 1}


def _seconds(sizes: Sizes, arrays: dict[str, Any], options: dict[str, Any]) -> float:
    """Median of a call after one that compiles."""
    from pallas_kernels.paged_attention import gpu

    attend = jax.jit(partial(gpu.paged_attention, sizes=sizes, **options))
    attend(**arrays).block_until_ready()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        attend(**arrays).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def path_of(device_kind: str, folder: Path = FOLDER) -> Path:
    return folder / f"{'_'.join(device_kind.lower().split())}.json"


def main() -> None:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if reason := why_not_on(capability):
        raise SystemExit(f"nothing to tune on {device.device_kind} ({device.platform}): {reason}")
    sizes, seconds = tune()
    print(f"{write(device.device_kind, sizes, seconds)}: {sizes}")


if __name__ == "__main__":
    main()
