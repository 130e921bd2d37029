"""Counter-based randomness: the noise of a sequence at a position depends only on its seed, its index and the position.

It uses threefry (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), like JAX's default generator.
Rows, buckets and batches are not known here, so they cannot change a token.

The hash is implemented here rather than taken from `jax.random` for two reasons. The bits must not depend on
`jax_threefry_partitionable`. And on a CPU JAX lowers its own hash to a loop over arrays: 68 ms for 32 rows of 150,000
words, against 5 ms for this one, which fuses. Besides, only the words that are needed are computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.sampling.fields import SamplerFeature, SlotField

TOKENS, GROUPS = 0, 1  # streams of noise: independent words for the same key

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Keys = tuple[jax.Array, jax.Array]  # uint32[R], twice: both words of each row's key


def row_keys(seeds: jax.Array, indices: jax.Array, positions: jax.Array) -> Keys:
    """The key data of `fold_in(fold_in(key(seed), index), position)`.

    seeds: uint32[R]; indices and positions: int32[R].
    """
    zero = jnp.zeros_like(seeds)
    keys = _threefry2x32(zero, seeds, zero, indices.astype(jnp.uint32))
    return _threefry2x32(*keys, zero, positions.astype(jnp.uint32))


def gumbel_noise(keys: Keys, words: jax.Array, stream: int) -> jax.Array:
    """float32[R, N] standard Gumbel noise for the word numbers int32[R, N].

    Word w of a row's stream TOKENS is word w of `jax.random.bits(key, (V,))`, whatever V. All 32 bits are used, and
    large noise, which decides the winner, comes from the fine end of the float grid: it ranges from -2.8 to 22.9.
    (`jax.random.gumbel` uses 23 bits and ends at 15.9, which favours low ids among 150,000 tokens of similar
    probability.)
    """
    key0, key1 = (jnp.broadcast_to(word[:, None], words.shape) for word in keys)
    counter = words.astype(jnp.uint32)
    high, low = _threefry2x32(key0, key1, jnp.full_like(counter, stream), counter)
    uniform = ((high ^ low).astype(jnp.float32) + 0.5) * 2.0**-32
    # The largest words round to 1, whose noise would be -inf: such a token could not win even alone.
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


# A separate jit, so that it is traced once; XLA inlines it.
@jax.jit
def _threefry2x32(
    key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The hash of counter (x0, x1) under a key, 20 rounds; words are uint32."""
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = x0 + key0, x1 + key1
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << distance) | (x1 >> (32 - distance))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + (i + 1)
    return x0, x1


RANDOM = SamplerFeature(
    name="random",
    fields=(
        SlotField(name="seed", dtype="uint32", value=lambda r, _: r.seed % 2**32),
        # 0: greedy
        SlotField(name="temperature", dtype="float32", value=lambda r, _: r.params.temperature),
    ),
    asked=lambda r: r.params.temperature > 0,
)
