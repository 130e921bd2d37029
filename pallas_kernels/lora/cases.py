"""Named argument sets for low-rank adapters: edge cases, and the layers of models."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`slots`: the possible slots of tokens, equally likely."""

    name: str
    num_tokens: int = 24
    slots: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    num_slots: int = 8
    rank: int = 32
    ranks: tuple[int, ...] = ()  # of the first adapters, if smaller: padded with zeros
    num_in: int = 256
    num_outs: tuple[int, ...] = (384,)
    dtype: str = "bfloat16"


SMALL = (
    Case(name="mixed"),
    Case(name="mixed-float32", dtype="float32"),
    Case(name="joined", num_outs=(256, 128, 128), num_in=384),
    Case(name="joined-float32", num_outs=(256, 128), dtype="float32"),
    Case(name="smaller-ranks", ranks=(8, 4, 32, 1, 16)),
    Case(name="unused-slots", slots=(0, 3, 6)),
    Case(name="one-slot", slots=(5,)),
    Case(name="no-adapter", slots=(0,)),
    Case(name="one-token", num_tokens=1, slots=(7,)),
    Case(name="ragged", num_tokens=67, num_outs=(384, 256)),
    Case(name="rank-16", rank=16, num_slots=16, slots=(1, 9, 16), num_outs=(256, 128)),
    Case(name="rank-64", rank=64, num_slots=6, slots=(0, 2, 5)),
    Case(name="rank-128", rank=128, num_slots=3, slots=(0, 3, 1)),
    Case(name="rank-256", rank=256, num_slots=3, slots=(0, 2, 1), num_outs=(128, 256)),
)

# Qwen2.5's linear layers, (in, outs): q, k and v; o; gate and up; down.
LAYERS = {
    "0.5b": ((896, (896, 128, 128)), (896, (896,)), (896, (4864, 4864)), (4864, (896,))),
    "7b": ((3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944, 18944)), (18944, (3584,))),
}


def arguments(case: Case, *, seed: int = 0, poison: bool = True) -> dict:
    """With `poison`, all weights of unused slots are NaN."""
    rng = np.random.default_rng(seed)
    shape = (case.num_slots, len(case.num_outs), case.rank, case.num_in)
    a = rng.standard_normal(shape) * case.num_in**-0.5
    b = [rng.standard_normal((n, case.num_slots, case.rank)) for n in case.num_outs]
    for slot, rank in enumerate(case.ranks):
        a[slot, :, rank:] = 0.0
        for each in b:
            each[:, slot, rank:] = 0.0
    slots = rng.choice(case.slots, case.num_tokens)
    unused = sorted(set(range(1, case.num_slots + 1)) - set(slots.tolist()))
    if poison:
        for each in (a, *(each.swapaxes(0, 1) for each in b)):
            each[[slot - 1 for slot in unused]] = np.nan
    return {
        "y": jnp.asarray(rng.standard_normal((case.num_tokens, sum(case.num_outs))), jnp.float32),
        "x": jnp.asarray(rng.standard_normal((case.num_tokens, case.num_in)), case.dtype),
        "a": jnp.asarray(a.reshape(-1, case.num_in), case.dtype),
        "b": [jnp.asarray(each.reshape(len(each), -1), case.dtype) for each in b],
        "slots": jnp.asarray(slots, jnp.int32),
        "num_slots": case.num_slots,
    }
