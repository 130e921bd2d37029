"""What every kernel that changes recurrent states by one token has to do: its tests subclass `OneTokenTests`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.packed_delta_rule import StateRows, of_packed_tokens, of_single_tokens
from pallas_kernels.delta_rule.cases import Case


class OneTokenTests:
    """`cases` are those that the kernel serves. All are slow."""

    cases: ClassVar[tuple[Case, ...]]
    fast: ClassVar[tuple[str, ...] | None] = ()
    definitions: ClassVar[tuple[ModuleType, ModuleType]]  # of cases, and the reference

    def apply(self, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        """States and outputs."""
        raise NotImplementedError

    def arguments(self, case: Case) -> dict[str, Any]:
        """NaN in all slots without a row that counts, where a sequence begins, and in tokens that do not count."""
        arguments = self.definitions[0].arguments(case)
        rows = arguments["rows"]
        free = np.setdiff1d(np.arange(case.num_slots), np.asarray(rows.slots)[: case.rows])
        padding = jnp.arange(case.most) >= case.rows

        def poisoned(x: jax.Array) -> jax.Array:
            return jnp.where(jnp.expand_dims(padding, range(1, x.ndim)), jnp.nan, x)

        tokens = jax.tree.map(poisoned, rows.tokens)
        states = arguments["states"].at[free].set(jnp.nan)
        return arguments | {"states": states, "rows": rows._replace(tokens=tokens)}

    def test_each_row_s_state_changes_in_its_slot(self, case: Case):
        """Other slots are as they were, to the bit."""
        arguments = self.arguments(case)
        states, out = self.apply(**arguments)
        wanted, wanted_out = map(np.asarray, self.definitions[1].one_token(**arguments))
        own = np.asarray(arguments["rows"].slots)[: case.rows]
        before = np.array(arguments["states"])
        others = np.setdiff1d(np.arange(case.num_slots), own)
        assert states[others].tobytes() == before[others].tobytes()
        assert np.isfinite(wanted[own]).all() and np.isfinite(wanted_out[: case.rows]).all()
        np.testing.assert_allclose(states[own], wanted[own], atol=1e-5, rtol=0)
        out, wanted_out = out[: case.rows], wanted_out[: case.rows]
        np.testing.assert_allclose(out, wanted_out, atol=2e-5, rtol=0)

    def check_rows_alone(self, case: Case) -> None:
        """To the bit the same alone, in another place among others, and in another slot."""
        assert case.rows == case.most < case.num_slots - 1
        arguments = self.arguments(case)
        rows, number = arguments["rows"], arguments["number"]
        states, out = self.apply(**arguments)
        order = np.roll(np.arange(case.rows), 2)
        turned = jax.tree.map(lambda x: x[order], rows)
        again, out_again = self.apply(states=arguments["states"], rows=turned, number=number)
        assert states.tobytes() == again.tobytes()
        np.testing.assert_array_equal(out_again, out[order])
        (free, *_) = np.setdiff1d(np.arange(1, case.num_slots), np.asarray(rows.slots))
        for row in range(case.rows):
            slot = int(rows.slots[row])
            moved = arguments["states"].at[free].set(arguments["states"][slot])
            alone = jax.tree.map(lambda x, row=row: x[row : row + 1], rows)
            alone = alone._replace(slots=jnp.full(1, free, jnp.int32))
            found, out_alone = self.apply(states=moved, rows=alone, number=jnp.int32(1))
            np.testing.assert_array_equal(found[free], states[slot])
            np.testing.assert_array_equal(out_alone[0], out[row])


def check_steps(states: jax.Array, tokens: Any) -> None:
    """Rows of a step, of one token and of several, are those of XLA with the kernel "gpu", which is interpreted.

    states: of eight slots; tokens: at least five.
    """
    states = jnp.nan_to_num(states)
    for compute, counts in ((of_single_tokens, (1, 1, 1, 1)), (of_packed_tokens, (1, 0, 3, 1))):
        counts = np.array(counts)
        ends = np.cumsum(counts)
        rows = StateRows(
            slots=jnp.array([3, 5, 1, 0], jnp.int32),
            first=jnp.array(ends - counts, jnp.int32),
            num_tokens=jnp.array(counts, jnp.int32),
            is_live=jnp.array(counts * [1, 1, 1, 0] > 0),
            begins=jnp.array([False, True, True, False]),
            parents=jnp.arange(4),
            is_sibling=jnp.zeros(4, bool),
            num_drafts=jnp.zeros(4, jnp.int32),
            num_accepted=jnp.zeros(4, jnp.int32),
        )
        own = jax.tree.map(lambda x, ends=ends: x[: ends[-1]], tokens)
        found, wanted = (compute(states, own, rows, kernel=kernel) for kernel in ("gpu", None))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)
        assert not np.array_equal(found[0], states)
