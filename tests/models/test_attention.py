"""Dense attention against its definition, written as loops."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.models.attention import DenseAttention


def by_loops(q, k, v, positions, scale, window, soft_cap):
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i, head in np.ndindex(q.shape[:2]):
        scores, values = [], []
        for j in range(len(k)):
            distance = positions[i] - positions[j]
            if distance < 0 or (window is not None and distance >= window):
                continue
            score = scale * q[i, head] @ k[j, head // group]
            scores.append(score if soft_cap is None else soft_cap * np.tanh(score / soft_cap))
            values.append(v[j, head // group])
        weights = np.exp(scores) / np.sum(np.exp(scores))
        out[i, head] = weights @ np.array(values)
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_dense_attention_is_causal_windowed_capped_and_grouped(heads, window, soft_cap):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, count, 8)) for count in (heads[0], heads[1], heads[1]))
    positions = np.arange(5, 14)
    options = {"scale": 0.7, "window": window, "soft_cap": soft_cap}
    attention = DenseAttention(jnp.asarray(positions, jnp.int32))
    got = attention(0, *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), **options)
    np.testing.assert_allclose(got, by_loops(q, k, v, positions, **options), atol=1e-5)


def test_sinks_take_their_share_and_have_no_value():
    """As a key more, of that score, whose value is 0."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((7, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    sinks = np.linspace(-3, 4, 6, dtype=np.float32)
    attention = DenseAttention(np.arange(7, dtype=np.int32))
    attend = jax.jit(partial(attention, 0, scale=0.7, window=None, soft_cap=None))
    plain = np.asarray(attend(q, k, v))
    got = np.asarray(attend(q, k, v, sinks=sinks))
    for i, head in np.ndindex(7, 6):
        total = np.exp(0.7 * k[: i + 1, head // 3] @ q[i, head]).sum()
        share = total / (total + np.exp(sinks[head]))
        np.testing.assert_allclose(got[i, head], share * plain[i, head], atol=1e-5)
