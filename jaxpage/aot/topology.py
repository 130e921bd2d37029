"""Devices that are not here: what jax's compilers need to compile for them.

The libtpu wheel holds the compiler of TPUs, the CUDA plugin that of GPUs; neither touches a device. They must be told
before jax is imported, so whoever compiles for a target does it in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from jaxpage.aot.targets import Target

TENSOR_AXIS = "tensor"

# What the driver of an H200 would tell. ACCELERATED_FEATURES make it sm_90a, which has wgmma.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def missing_compiler(platform: str) -> str | None:
    """What must be installed to compile for "tpu" or "gpu"; None if nothing is missing."""
    if platform == "tpu":
        found = _is_installed("libtpu")
        return None if found else "the compiler of TPUs is not installed: pip install libtpu"
    if not _is_installed("jax_plugins") or not _is_installed("jax_plugins.xla_cuda13"):
        return (
            "the compiler of GPUs is not installed: pip install jax-cuda13-plugin and jax-cuda13-pjrt of "
            "the version of jax, and nvidia-cuda-nvcc"
        )
    return None if cuda_folder() else "there is no ptxas: pip install nvidia-cuda-nvcc"


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def environment(target: Target) -> list[str]:
    """`NAME=value` of the variables that must stand before a process that compiles for `target` imports jax."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.chip.platform == "tpu":
        variables["TPU_SKIP_MDS_QUERY"] = "1"  # nobody asks for the metadata of a TPU VM
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no device is touched
    else:
        # Autotuning would run candidates on the device.
        variables["XLA_FLAGS"] = (
            f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={cuda_folder()}"
        )
        if folder := cuda_folder():  # Mosaic GPU takes the first ptxas on the PATH
            variables["PATH"] = os.pathsep.join([str(folder / "bin"), *os.get_exec_path()])
    return [f"{name}={value}" for name, value in variables.items()]


def mesh_of(target: Target, num_devices: int):
    """A `jax.sharding.Mesh` of the first devices of a target, along TENSOR_AXIS. Raises ValueError for too many."""
    from jax.sharding import Mesh

    devices = _devices(target)
    if num_devices > len(devices):
        raise ValueError(f"{target.name} has {len(devices)} devices, fewer than {num_devices}")
    return Mesh(np.array(devices[:num_devices]), (TENSOR_AXIS,))


def _devices(target: Target) -> list:
    from jax.experimental import topologies

    if target.chip.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
    from jax._src import xla_bridge  # the plugin is known by this only

    xla_bridge.discover_pjrt_plugins()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H200, topology="1x1x1"
    ).devices


def cuda_folder() -> Path | None:
    """That of a CUDA toolkit, or of the wheel with its assembler."""
    wheels = [Path(path) / "nvidia" / "cu13" for path in sys.path]
    on_path = shutil.which("ptxas")
    folders = wheels + ([Path(on_path).resolve().parents[1]] if on_path else [])
    return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)
