"""A device as data, of one that is present and of one that is not."""

from __future__ import annotations

from types import SimpleNamespace

import jax

from jaxpage.device import Device


def test_a_device_that_is_present_is_asked():
    stats = {"bytes_limit": 1 << 30}
    gpu = SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        compute_capability="9.0",
        memory_stats=lambda: stats,
    )
    assert Device.of(gpu) == Device(
        platform="gpu", kind="NVIDIA H200", compute_capability="9.0", memory_bytes=1 << 30
    )


def test_a_cpu_knows_no_capability():
    device = Device.of(jax.devices("cpu")[0])
    assert (device.platform, device.kind, device.compute_capability) == ("cpu", "cpu", None)


def test_the_memory_of_a_topology_is_what_it_is_said_to_be():
    def memory_stats():
        raise NotImplementedError("a topology has no memory")

    tpu = SimpleNamespace(platform="tpu", device_kind="TPU7x", memory_stats=memory_stats)
    assert Device.of(tpu, memory_bytes=5) == Device(platform="tpu", kind="TPU7x", memory_bytes=5)
