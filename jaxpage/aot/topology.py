"""Compile-only topologies: what jax's compilers need to compile for devices that this machine does not have.

The libtpu wheel contains the compiler for TPUs, the CUDA plugin the one for GPUs; neither needs a device. They are
configured by variables that must be set before jax is imported, so `process` starts a process for each target.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from jaxpage.aot.targets import Target

COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}  # packages, by platform
_EXTRAS = {"tpu": "tpu", "gpu": "cuda13-local"}  # jax's extras that require them

# As an H200's driver reports it. ACCELERATED_FEATURES make it sm_90a, which has wgmma.
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
    """What is missing to compile for "tpu" or "gpu", and how to install it; None if nothing is."""
    wanted = f"{COMPILERS[platform]}{wanted_version(platform)}"
    if platform == "tpu":
        found = _is_installed("libtpu")
        return None if found else f"the TPU compiler is not installed: pip install '{wanted}'"
    if not _is_installed("jax_plugins") or not _is_installed("jax_plugins.xla_cuda13"):
        return f"the GPU compiler is not installed: pip install '{wanted}' nvidia-cuda-nvcc"
    return None if cuda_folder() else "ptxas is not installed: pip install nvidia-cuda-nvcc"


def wanted_version(platform: str) -> str:
    """The compiler version that the installed jax requires, such as "==0.0.42.*"; "" if it does not name one."""
    package, extra = COMPILERS[platform], _EXTRAS[platform]
    of_package = re.compile(rf"""{package}([=<>~!][^;]*);.*extra == ["']{extra}["']""")
    found = (of_package.match(each) for each in metadata.requires("jax") or ())
    return next((match[1].strip() for match in found if match), "")


def compiler_advice(platform: str) -> str:
    """What to install if the compiler does not work: the version that jax requires. "" if it is installed."""
    package, wanted = COMPILERS[platform], wanted_version(platform)
    try:
        installed = metadata.version(package)
        if not wanted or Requirement(f"{package}{wanted}").specifier.contains(installed):
            return ""
    except metadata.PackageNotFoundError:  # a nightly build has a different name
        installed = "under a different name"
    return (
        f"{package} {installed} is installed, but jax {metadata.version('jax')} requires "
        f"{package}{wanted}: pip install '{package}{wanted}'"
    )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def environment(target: Target) -> list[str]:
    """`NAME=value` of the variables that must be set before a process that compiles for `target` imports jax."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if target.chip.platform == "tpu":
        variables["TPU_SKIP_MDS_QUERY"] = "1"  # do not query a TPU VM's metadata
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no device is touched
    else:
        # Autotuning would run candidates on the device.
        variables["XLA_FLAGS"] = (
            f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={cuda_folder()}"
        )
        if folder := cuda_folder():  # Mosaic GPU uses the first ptxas on the PATH
            variables["PATH"] = os.pathsep.join([str(folder / "bin"), *os.get_exec_path()])
    return [f"{name}={value}" for name, value in variables.items()]


def mesh_of(target: Target, num_devices: int):
    """A `jax.sharding.Mesh` of the first devices of a target, along TENSOR. Raises ValueError if it has fewer."""
    from jax.sharding import Mesh

    from jaxpage.parallel.sharding import TENSOR

    devices = _devices(target)
    if num_devices > len(devices):
        raise ValueError(f"{target.name} has {len(devices)} devices, fewer than {num_devices}")
    return Mesh(np.array(devices[:num_devices]), (TENSOR,))


def _devices(target: Target) -> list:
    from jax.experimental import topologies

    if target.chip.platform == "tpu":
        # Otherwise libtpu wants whole hosts, which have four chips or more.
        alone = {"chips_per_host_bounds": (1, 1, 1)} if target.num_chips == 1 else {}
        return topologies.get_topology_desc(
            platform="tpu", topology_name=target.name, **alone
        ).devices
    from jax._src import xla_bridge  # there is no public way to load the plugin without a GPU

    xla_bridge.discover_pjrt_plugins()
    # One host, whose devices NVLink connects.
    shape = f"1x1x{target.num_devices}"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, target_config=H200, topology=shape
    ).devices


def cuda_folder() -> Path | None:
    """The folder of a CUDA toolkit, or of the wheel with ptxas; None if there is neither."""
    wheels = [Path(path) / "nvidia" / "cu13" for path in sys.path]
    on_path = shutil.which("ptxas")
    folders = wheels + ([Path(on_path).resolve().parents[1]] if on_path else [])
    return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)
