"""min_p, top-k and top-p as thresholds on the logits, without sorting the vocabulary.

The 128 best tokens of each row settle almost every request. Where they do not (top_k > 128, or a nucleus of more
than 128 tokens) the threshold is found by bisection over the float32 numbers themselves: at most 32 passes that
each compare and add, and exact, for there is no float between the last two bounds. For one row of 150,000 XLA's
sort takes 28 ms on a CPU, the 128 best 0.3 ms, a pass 0.05 ms.

Knows logits and four numbers a row. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.sampling.fields import RequestState, SamplerFeature, SlotField
from jaxpage.sampling.row_ops import where_any

_NUM_BEST = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Kept:
    """Which tokens of each row are left: those with a logit of at least `lowest`. R rows, B of the best tokens."""

    lowest: jax.Array  # float32[R]
    best: jax.Array  # float32[R, B] logits in falling order
    best_ids: jax.Array  # int32[R, B]

    @property
    def is_among_best(self) -> jax.Array:
        """bool[R]: whether no other tokens are left than some of the best. Tokens of equal logits stay together."""
        return self.lowest > self.best[:, -1]


def truncate(
    logits: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> Kept:
    """What min_p, top-k and top-p leave of logits, float32[R, V]. Parameters [R], off at top_k 0, top_p 1 and min_p 0.

    logits: not divided by the temperature, which probabilities are of. Divided in several places they may be rounded in
    several ways, and then the best token can be below the threshold that it sets.

    min_p drops tokens less than min_p times as likely as the best. top_k keeps the k-th best and all that equal it.
    top_p keeps, of what is left and renormalised, the smallest set of most likely tokens with a mass of at least
    top_p, and all tokens that equal its last one (vLLM keeps some of these, as its sort happens to order them).
    The best token is always kept.
    """
    # Without the barrier XLA:CPU sorts the whole vocabulary where it sees that the ids are not used. Turned round,
    # because for several devices it ends with an error where a barrier takes the pair as it is.
    found = find_best(logits, min(_NUM_BEST, logits.shape[1]))
    ids, best = lax.optimization_barrier(found[::-1])

    def odds(x):
        """Against the best token."""
        return jnp.exp((x - best[:, :1]) / temperature[:, None])

    # Each pass over all logits is in a branch, for the rows that the best tokens do not settle.
    def likely(x):
        return jnp.where(odds(x) >= min_p[:, None], x, jnp.inf).min(-1)

    lowest = where_any(
        (min_p > 0) & (odds(best[:, -1:])[:, 0] >= min_p),
        lambda: likely(logits),
        jnp.where(min_p > 0, likely(best), -jnp.inf),
        of=logits,
    )

    # Both ask for the best tokens until their weights sum up to a target: top-k weighs each token 1, top-p by its
    # odds. A loop of two, so that the search is compiled once.
    def keep_enough(turn, lowest):
        by_count = turn == 0

        def weights(x):
            return jnp.where(x >= lowest[:, None], jnp.where(by_count, 1.0, odds(x)), 0.0)

        asked = jnp.where(by_count, top_k > 0, top_p < 1)
        others = asked & (lowest <= best[:, -1]) & ~(by_count & (top_k <= best.shape[1]))
        mass = weights(best)
        total = where_any(others, lambda: weights(logits).sum(-1), mass.sum(-1), of=logits)
        target = jnp.where(by_count, top_k.astype(jnp.float32), top_p * total)
        short = _num_short(mass, target)
        index = jnp.minimum(short, best.shape[1] - 1)
        threshold = jnp.take_along_axis(best, index[:, None], axis=1)[:, 0]
        is_open = others & (short == best.shape[1]) & (target < total)
        threshold = where_any(
            is_open,
            lambda: _bisect(
                *(logits, weights(logits), target),
                low=jnp.where(is_open, -jnp.inf, threshold),
                high=threshold,
            ),
            threshold,
            of=logits,
        )
        is_enough = asked & ((target < total) | ~others)
        return jnp.where(is_enough, jnp.maximum(lowest, threshold), lowest)

    lowest = lax.fori_loop(0, 2, keep_enough, lowest)
    return Kept(lowest=lowest, best=best, best_ids=ids)


@partial(jax.jit, static_argnames="k")
def find_best(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of float32[R, V]: values in falling order and their ids, int32[R, k]; of equal ones the first.

    For a GPU XLA sorts the whole rows for that, values with ids, in some 30 passes. There only maxima of groups are
    sorted: the k best tokens are in the k groups with the greatest maxima.

    By what the compilers make of 64 rows of 151,936 (39 MB; tests/aot/test_sampling.py), a pass takes 24 us of a v6e's
    bandwidth and 8 us of an H200's, where the head of a model of 0.5B takes 166 and 57. TPUs have a TopK of their own,
    one pass, and keep what the bisection reads in VMEM; on an H200 this is one pass too, and the bisection reads 78 MB
    a turn, if there is one.
    """
    best, ids = lax.platform_dependent(
        x, cuda=partial(_best_by_groups, k=k), default=lambda x: tuple(lax.top_k(x, k))
    )
    return best, ids


def _best_by_groups(x: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    """Sorts of 1024 to 2048 groups, then groups within those, until so few numbers are left: one pass over x."""
    num_rows, width = x.shape
    ids = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), x.shape)
    while width >= 4096 and k <= 512:
        size = 1 << ((width // 1024).bit_length() - 1)
        fill = (0, 0), (0, -width % size)
        x = jnp.pad(x, fill, constant_values=-jnp.inf).reshape(num_rows, -1, size)
        ids = jnp.pad(ids, fill).reshape(x.shape)
        _, groups = lax.top_k(x.max(-1), k)
        groups = jnp.sort(groups, axis=1)[:, :, None]  # or equal tokens would change places
        x, ids = (jnp.take_along_axis(y, groups, axis=1).reshape(num_rows, -1) for y in (x, ids))
        width = x.shape[1]
    best, where = lax.top_k(x, k)
    return best, jnp.take_along_axis(ids, where, axis=1)


def _num_short(weights: jax.Array, target: jax.Array) -> jax.Array:
    """int32[R]: how many of the sums of the first 1, 2, ... B weights are below target. float32[R, B], float32[R]."""
    # Prefix sums, written as one reduction: XLA:CPU expands `jnp.cumsum` into a tree that compiles slowly.
    index = jnp.arange(weights.shape[1], dtype=jnp.int32)
    up_to = (index[:, None] >= index[None, :])[None]
    sums = jnp.where(up_to, weights[:, None, :], 0.0).sum(-1)
    return (sums < target[:, None]).sum(-1, dtype=jnp.int32)


@jax.jit
def _bisect(
    logits: jax.Array, weights: jax.Array, target: jax.Array, low: jax.Array, high: jax.Array
) -> jax.Array:
    """float32[R]: the largest t in [low, high] with `weights[logits >= t].sum() >= target`; low if there is none.

    logits, weights: float32[R, V]; the rest float32[R]. Rows with low == high cost nothing.
    """
    args = (logits, weights, target, _order(low), _order(high) + 1)
    # One row at a time stays in a CPU's cache (twice as fast) and skips the rows that are settled; elsewhere a pass
    # over all rows costs hardly more than one over a single row.
    return lax.platform_dependent(
        *args, cpu=partial(_search, one_by_one=True), default=partial(_search, one_by_one=False)
    )


def _search(
    logits: jax.Array,
    weights: jax.Array,
    target: jax.Array,
    low: jax.Array,
    high: jax.Array,
    *,
    one_by_one: bool,
) -> jax.Array:
    """`_bisect` in [low, high), numbered by `_order`. Each turn halves one row's bounds, or those of all rows."""

    def middle(bounds):
        low, high = bounds
        return (low >> 1) + (high >> 1) + (low & high & 1)  # low + high may overflow

    def halve(bounds):
        low, high = bounds
        mid = middle(bounds)
        if one_by_one:
            row = lax.argmax(mid > low, 0, jnp.int32)
            mass = jnp.where(logits[row] >= _float(mid[row]), weights[row], 0.0).sum()[None]
            chosen = jnp.arange(low.shape[0], dtype=jnp.int32) == row
        else:
            mass = jnp.where(logits >= _float(mid)[:, None], weights, 0.0).sum(-1)
            chosen = mid > low
        # Exactly the target: the set is found, wherever the threshold lies between two tokens.
        enough, too_much = mass >= target, mass > target
        return jnp.where(chosen & enough, mid, low), jnp.where(chosen & ~too_much, mid, high)

    low, _ = lax.while_loop(lambda bounds: (middle(bounds) > bounds[0]).any(), halve, (low, high))
    return _float(low)


def _order(x: jax.Array) -> jax.Array:
    """int32: numbers the floats in their order, so that halfway between two is another float."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float(order: jax.Array) -> jax.Array:
    """The inverse of `_order`."""
    return lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)


def truncate_rows(logits: jax.Array, state: RequestState, slots: jax.Array) -> Kept:
    """`truncate` by the parameters of the rows' requests; greedy rows keep all."""
    temperature = state["temperature"][slots]
    random = temperature > 0
    return truncate(
        logits,
        temperature=jnp.where(random, temperature, 1.0),
        top_k=jnp.where(random, state["top_k"][slots], 0),
        top_p=jnp.where(random, state["top_p"][slots], 1.0),
        min_p=jnp.where(random, state["min_p"][slots], 0.0),
    )


TRUNCATION = SamplerFeature(
    name="truncation",
    fields=(
        SlotField(name="top_k", value=lambda r, vocab_size: min(r.params.top_k, vocab_size)),
        SlotField(name="top_p", dtype="float32", fill=1.0, value=lambda r, _: r.params.top_p),
        SlotField(name="min_p", dtype="float32", value=lambda r, _: r.params.min_p),
    ),
    asked=lambda r: (
        r.params.temperature > 0
        and (r.params.top_k > 0 or r.params.top_p < 1 or r.params.min_p > 0)
    ),
)
