"""The gated delta rule against transformers' own functions, and against itself, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.models.recurrence import WholeSequences
from jaxpage.ops import delta_rule
from jaxpage.ops.delta_rule import CHUNK, to_tokens
from pallas_kernels.delta_rule import reference
from pallas_kernels.delta_rule.chunks import unit_lower_inverse
from pallas_kernels.mamba2 import reference as mamba2

HEADS, VALUES, KEY_DIM, VALUE_DIM = 2, 3, 16, 24


def inputs(num_tokens: int, *, batch: int = 2, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v, log decay, beta."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((batch, num_tokens, *shape)).astype(np.float32)

    q, k = normal(HEADS, KEY_DIM), normal(HEADS, KEY_DIM)
    v, rate = normal(HEADS, VALUES, VALUE_DIM), normal(HEADS, VALUES)
    beta = rng.random(rate.shape).astype(np.float32)
    return q, k, v, -np.exp(rate - 1), beta


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_whole_sequences_equal_transformers(name):
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5

    given = inputs(2 * CHUNK + 22)
    q, k, *of_values = (torch.tensor(x) for x in given)
    v, log_decay, beta = (x.flatten(2, 3) for x in of_values)
    expected, _ = getattr(modeling_qwen3_5, name)(
        q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    found = delta_rule.whole(to_tokens(*given))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=5e-6, rtol=0)


def test_chunks_are_tokens_one_by_one():
    tokens = to_tokens(*inputs(CHUNK + 9))
    state = jnp.zeros((2, HEADS, VALUES, KEY_DIM, VALUE_DIM))
    step, expected = jax.jit(reference.next_state), []
    for index in range(CHUNK + 9):
        state, out = step(state, jax.tree.map(lambda x, i=index: x[:, i], tokens))
        expected.append(out)
    found = jax.jit(delta_rule.whole)(tokens)
    np.testing.assert_allclose(found, np.stack(expected, axis=1), atol=5e-6, rtol=0)


@pytest.mark.slow
def test_mamba2_equals_transformers():
    import torch
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid

    q, k, v, rate, steps = inputs(2 * CHUNK + 22)
    chosen = {"chunk_size": 32, "dt_limit": (0.0, float("inf"))}
    values, dt = (torch.tensor(x).flatten(2, 3) for x in (v, steps))
    slopes = torch.tensor(rate[0, 0].reshape(-1))
    expected = modeling_granitemoehybrid.mamba2_chunk_scan(
        values, dt, slopes, torch.tensor(k), torch.tensor(q), **chosen
    )
    joined = (v * steps[..., None]).reshape(*v.shape[:3], -1)
    tokens = mamba2.Tokens(*map(jnp.asarray, (q, k, joined, rate[0, 0] * steps)))
    found = np.asarray(delta_rule.whole(tokens)).reshape(expected.shape)
    atol = 2e-6 * float(expected.abs().max())
    np.testing.assert_allclose(found, expected.numpy(), atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_the_inverse_is_as_exact_as_forward_substitution(kind):
    """Equal keys that replace each other's values: powers of the matrix have entries up to 10^17."""
    rng = np.random.default_rng(1)
    dense = (
        np.ones((3, CHUNK, CHUNK))
        if kind == "equal keys"
        else rng.uniform(-1, 1, (3, CHUNK, CHUNK))
    )
    lower = np.tril(dense, -1).astype(np.float32)
    if kind == "random":
        lower /= np.float32(np.sqrt(CHUNK))
    exact = np.linalg.inv(np.eye(CHUNK) + lower.astype(np.float64))
    np.testing.assert_allclose(unit_lower_inverse(lower), exact, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_padding_before_and_after_a_sequence_changes_nothing():
    num_tokens, before, after = 70, 5, 20
    q, k, v, log_decay, beta = inputs(num_tokens, batch=1)
    x = np.random.default_rng(2).standard_normal((1, num_tokens, 8)).astype(np.float32)
    weight = np.random.default_rng(3).standard_normal((8, 3)).astype(np.float32)
    alone = WholeSequences()
    expected = (
        alone.convolve(0, [x], [weight])[0],
        alone.advance(0, to_tokens(q, k, v, log_decay, beta)),
    )

    def padded(x: np.ndarray) -> np.ndarray:
        widths = [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)]
        return np.pad(x, widths, constant_values=0.5)

    where = np.pad(np.ones((1, num_tokens), bool), [(0, 0), (before, after)])
    among = WholeSequences(jnp.asarray(where))
    found = (
        among.convolve(0, [jnp.asarray(padded(x))], [weight])[0],
        among.advance(0, to_tokens(*map(padded, (q, k, v, log_decay, beta)))),
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[:, before:-after], other, atol=5e-6, rtol=0)
