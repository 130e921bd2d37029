"""Programs on disk are kept apart by whatever jax passes to the compiler."""

from __future__ import annotations

import jax
import pytest

from jaxpage.runner.fingerprint import machine_fingerprint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_disable_most_optimizations", True),
        ("jax_optimization_level", "O1"),
        ("jax_memory_fitting_level", "O0"),
        ("jax_compiler_enable_remat_pass", False),
        ("jax_default_matmul_precision", "float32"),
    ],
)
def test_options_of_jax_for_its_compiler(name, value):
    device = jax.devices("cpu")[0]
    before, own = machine_fingerprint(device, flags=""), jax.config.values[name]
    jax.config.update(name, value)
    try:
        after = machine_fingerprint(device, flags="")
    finally:
        jax.config.update(name, own)
    assert after != before
    assert machine_fingerprint(device, flags="") == before
