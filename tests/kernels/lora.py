"""What every implementation of low-rank adapters has to do: its tests subclass `LoraTests`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pallas_kernels.lora import cases
from pallas_kernels.lora.cases import Case


class LoraTests:
    """`cases` are those that the implementation serves, `fast` the names in the fast core (None: all).

    `poison`: weights of slots that no token has may be NaN.
    """

    cases: ClassVar[tuple[Case, ...]] = cases.SMALL
    fast: ClassVar[tuple[str, ...] | None] = ("mixed-float32", "joined", "unused-slots")
    poison: ClassVar[bool] = True

    def apply(self, **arguments: Any) -> np.ndarray:
        """float32[T, F]"""
        raise NotImplementedError

    def test_each_token_gets_the_adapter_of_its_slot(self, case: Case):
        self.check(case)

    def check(self, case: Case, **options: Any) -> None:
        """Sums differ in their order, and in bfloat16 A x may be rounded to the other side."""
        arguments = cases.arguments(case, poison=self.poison)
        out, want = self.apply(**arguments, **options), numpy_lora(**arguments)
        assert out.shape == want.shape and out.dtype == np.float32
        error = np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)
        assert error.max() < (1e-6 if case.dtype == "float32" else 1e-3)
        none = np.asarray(arguments["slots"]) == 0
        np.testing.assert_array_equal(out[none], np.asarray(arguments["y"])[none])


def case_of(name: str) -> Case:
    return next(case for case in cases.SMALL if case.name == name)


def numpy_lora(y, x, a, b, slots, *, num_slots: int) -> np.ndarray:
    """float64 [T, F], a token at a time."""
    dtype, rank = np.asarray(a).dtype, b[0].shape[1] // num_slots
    y, x, a, slots = (np.asarray(each).astype(np.float64) for each in (y, x, a, slots))
    out = []
    for token, (base, slot) in enumerate(zip(y, slots.astype(int), strict=True)):
        added = np.zeros(0)
        for part, weight in enumerate(np.asarray(each).astype(np.float64) for each in b):
            if slot == 0:
                added = np.append(added, np.zeros(len(weight)))
                continue
            first = ((slot - 1) * len(b) + part) * rank
            inner = (a[first : first + rank] @ x[token]).astype(dtype).astype(np.float64)
            added = np.append(added, weight[:, (slot - 1) * rank : slot * rank] @ inner)
        out.append(base + added)
    return np.stack(out)
