"""`jaxpage doctor`: what is installed, which devices are there, what they can run, and whether the caches are well.

Every line is looked up or tried, none assumed. Must not know how anything is done.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.aot.check import check_compiler
from jaxpage.aot.topology import COMPILERS
from jaxpage.device import Device
from jaxpage.environment import compiler_flags, resolve_cache_dir
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.ops import state_kernel
from jaxpage.ops.attention import Heads, choose, describe
from jaxpage.parallel.heads import share_heads
from jaxpage.runner.fingerprint import version_of
from jaxpage.runner.program_store import survey
from pallas_kernels import hopper

PACKAGES = ("jaxpage", "jax", "jaxlib", "flax", "numpy", "transformers", "orbax-checkpoint")
FREE_DISK = 1 << 30  # bytes that a cache should have left
MB, GB = 10**6, 10**9


@dataclass(frozen=True)
class Line:
    """A fact, and whether it is one to worry about."""

    name: str
    text: str
    is_well: bool = True


def main(compilation_cache_dir: str | None = None) -> int:
    """Say what is installed, which devices are there, and what they can run. Returns 1 if something is wrong."""
    is_well = True
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("compilers for other hardware", _compilers()),
        ("compiled programs", _cache(resolve_cache_dir(compilation_cache_dir))),
    ):
        print(title)
        for line in lines:
            is_well &= line.is_well
            print(f"  {'' if line.is_well else 'WRONG '}{line.name:<18} {line.text}", flush=True)
    print("all is well" if is_well else "see the lines that say WRONG")
    return 0 if is_well else 1


def _versions() -> Iterator[Line]:
    yield Line("python", platform.python_version())
    for package in PACKAGES:
        version = version_of(package)
        yield Line(package, version, version != "none")
    yield Line("compiler flags", compiler_flags() or "none")


def _devices() -> Iterator[Line]:
    """Lines about each platform that jax finds, and about a product that was computed there."""
    try:
        platforms = dict.fromkeys(("cpu", jax.default_backend()))
    except RuntimeError as error:
        yield Line("jax", f"finds no device: {' '.join(str(error).split())}", False)
        return
    for name in platforms:
        devices = jax.devices(name)
        device = Device.of(devices[0])
        limit = device.memory_bytes
        memory = f", {limit / GB:.1f} GB for programs" if limit else ""
        yield Line(name, f"{len(devices)} x {device.kind}{memory}")
        yield Line("", f"attention of a model such as Qwen2.5-3B: {_attention(device)}")
        yield Line("", f"decode steps' recurrent states, as Qwen3.5-4B's: {_states(device)}")
        error = _error_of_product(devices[0])
        yield Line("", f"a bfloat16 product has a relative error of {error:.1e}", error < 1e-2)


def _attention(device: Device) -> str:
    """What serves 16 query heads on 2 KV heads there, and why no kernel does."""
    pool = KVPoolSpec(
        num_arrays=1,
        num_blocks=2,
        block_size=64 if device.platform == "gpu" else 128,
        num_kv_heads=2,
        head_dim=128,
        dtype=jnp.dtype(jnp.bfloat16),
        platform=device.platform,
    )
    heads = (Heads(share_heads(16, 2, 1), 128),)
    choice = choose(pool, device, heads=heads, table=(256, 256))
    return describe(choice.name, choice.reason)


def _states(device: Device) -> str:
    """What changes those of 32 value heads there, and why no kernel does."""
    choice = state_kernel.choose((16, 2, 128, 128), 2, device, is_mamba=False)
    return describe(choice.name, choice.reason)


def _error_of_product(device: jax.Device) -> float:
    """The relative error of a product on the device, against float64 on the host."""
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(64, 64)).astype(jnp.bfloat16) for _ in range(2))
    product = jnp.dot(
        jax.device_put(a, device), jax.device_put(b, device), preferred_element_type=jnp.float32
    )
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.linalg.norm(np.asarray(product) - wanted) / np.linalg.norm(wanted))


def _compilers() -> Iterator[Line]:
    for name in COMPILERS:
        yield Line(name, *check_compiler(name))
    if path := hopper.find_ptxas():
        version = hopper.ptxas_version(path)
        text = "version unknown" if version is None else ".".join(map(str, version))
        yield Line("ptxas", hopper.unsupported_ptxas(path, version) or f"{text} ({path})")


def _cache(folder: str) -> Iterator[Line]:
    if not folder:
        yield Line("folder", "none: every start compiles everything")
        return
    root = Path(folder)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = root / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        yield Line("folder", f"{folder} cannot be written: {error}", False)
        return
    free = shutil.disk_usage(root).free
    yield Line("folder", f"{folder}, {free / GB:.1f} GB free", free > FREE_DISK)
    found = survey(root / "programs")
    text = (
        f"{found.num_programs} programs, {found.num_bytes / MB:.0f} MB, of {found.num_sets} engines"
    )
    yield Line("cached", text)
    for path in found.damaged:
        yield Line("damaged", f"{path}; it is compiled anew when it is needed", False)
    for path in found.unsafe:
        yield Line("not read", f"{path}, because others can write it; chmod o-w it", False)
