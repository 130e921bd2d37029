"""Chooses tile sizes of the TPU attention kernel without a TPU: `python -m jaxpage.aot.tune v6e:2x2` writes `tuned/`.

Each candidate is compiled; a call takes the larger of its bundles over the clock and its bytes over the bandwidth.
Waiting for DMAs is not modelled, so a file that was measured on a device is better, and is not overwritten.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from jaxpage.aot.process import run
from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import missing_compiler
from jaxpage.aot.tpu_schedule import dump_variables
from jaxpage.environment import libtpu_flags
from pallas_kernels.paged_attention.tpu_shape import TileSizes
from pallas_kernels.tile_sizes import folder_of, path_of, write

FOLDER = folder_of("paged_attention")
SOURCE = "compiled schedules"


def tune_for(
    target: Target, folder: Path = FOLDER, candidates: dict[str, dict[str, list[int]]] | None = None
) -> Path:
    """Returns the file that it writes. candidates: values of each size for "decode" and "prefill"; None: the tuner's.

    Raises ValueError for a target without the kernel or its compiler, and if the file was measured on a device.
    """
    if target.chip.platform != "tpu":
        raise ValueError(f"{target.name} is not a TPU; only TPUs have schedules to count")
    if missing := missing_compiler("tpu"):
        raise ValueError(missing)
    path = path_of(target.chip.device_kind, folder)
    if path.exists() and json.loads(path.read_text()).get("source", "measured") == "measured":
        raise ValueError(f"{path} was measured on a device; remove it to write one from schedules")
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as dumped:
        request = {"target": target.name, "dumped": dumped, "candidates": candidates}
        variables = dump_variables(Path(dumped), flags=libtpu_flags())
        found: dict[str, Any] = run("jaxpage.aot.tune_worker", request, target, variables=variables)
    sizes = TileSizes(**found["sizes"])
    source = f"{SOURCE}, {found['compiler']}"
    return write(target.chip.device_kind, sizes, found["seconds"], folder, source)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tile sizes for TPUs, without having one.")
    parser.add_argument("targets", nargs="+", help="v5e:2x2 v5p:2x2x1 v6e:2x2 tpu7x:2x2x1")
    for text in parser.parse_args().targets:
        path = tune_for(parse_target(text))
        print(f"{path}: {json.loads(path.read_text())['sizes']}", flush=True)


if __name__ == "__main__":
    main()
