"""The checks of the delta rule's kernels: what is right passes, and what is wrong does not."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxpage.bench import delta_rule

RULES = ("delta_rule", "mamba2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "delta_rule (xla) one token, one-row",
        "delta_rule (xla) windows, small-windows",
        "mamba2 (xla) one token, one-row",
        "mamba2 (xla) windows, a-window-between",
    ],
)
def test_wrong_states_and_outputs_are_found(name):
    (check,) = (each for each in delta_rule.checks("cpu", tiny=False) if each.name == name)
    states, out = map(np.array, jax.jit(check.run)(*check.arguments))
    assert 0 < check.error((states, out)) < 1e-5
    before = np.asarray(check.arguments[0])
    is_same = [new.tobytes() == old.tobytes() for new, old in zip(states, before, strict=True)]
    own, other = is_same.index(False), len(is_same) - 1 - is_same[::-1].index(True)
    for slot, change, least in (
        (own, lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), 1e-3),
        (own, lambda x: x * np.nan, np.inf),
        (other, lambda x: np.nextafter(x, 9), np.inf),
    ):
        wrong = states.copy()
        wrong[slot] = change(wrong[slot])
        assert check.error((wrong, out)) >= least
        assert not check.bar.holds(check.error((wrong, out)))
    assert check.error((states, 1.02 * out)) > 0.01
    assert check.error((before, out)) > 0.1


def test_every_kernel_is_checked_where_it_can_run():
    by_token, by_windows = "one token", "windows"
    of_xla = [("xla", by_token), ("xla", by_windows)]
    for platform, kernels in (
        ("cpu", []),
        ("gpu", [("gpu", by_token)]),
        ("tpu", [("tpu", by_token), ("tpu", by_windows)]),
    ):
        names = [each.name for each in delta_rule.checks(platform, tiny=True)]
        found = {name.split(", ")[0] for name in names}
        kinds = of_xla + kernels
        assert found == {f"{rule} ({module}) {kind}" for rule in RULES for module, kind in kinds}
