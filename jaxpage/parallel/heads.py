"""How attention heads are divided among devices, with padding if necessary. Knows numbers of heads only."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class HeadShares:
    """Heads with padding, so that all of `num_devices` have equally many.

    Either a device has several KV heads, with all query heads that read them; or several devices share a KV head, and
    each has a part of its query heads. Padding is computed and discarded: at most one KV head per device, or one query
    head. The alternative, all heads on every device, would make each read the whole KV cache.
    """

    num_devices: int
    num_kv_heads: int  # of the model
    group: int  # query heads per KV head
    padded_kv_heads: int  # of the model with padding
    padded_group: int

    @property
    def of_pool(self) -> int:
        """KV heads on all devices together. A KV head on several devices counts once per device."""
        return max(self.padded_kv_heads, self.num_devices)

    @property
    def kv_heads_of_a_device(self) -> int:
        return self.of_pool // self.num_devices

    @property
    def query_heads_of_a_device(self) -> int:
        return self.padded_kv_heads * self.padded_group // self.num_devices

    @property
    def owns_kv_heads(self) -> bool:
        """Whether no KV head is on several devices."""
        return self.padded_kv_heads % self.num_devices == 0

    def pad_queries(self, q: jax.Array) -> jax.Array:
        """[T, H, D] -> [T, H', D] with zeros for padding heads."""
        if not self.has_padding:
            return q
        heads = q.reshape(q.shape[0], self.num_kv_heads, self.group, q.shape[2])
        more = (self.padded_kv_heads - self.num_kv_heads, self.padded_group - self.group)
        padded = jnp.pad(heads, ((0, 0), (0, more[0]), (0, more[1]), (0, 0)))
        return padded.reshape(q.shape[0], -1, q.shape[2])

    def pad_kv(self, x: jax.Array) -> jax.Array:
        """[T, K, D] -> [T, K', D]"""
        return jnp.pad(x, ((0, 0), (0, self.padded_kv_heads - self.num_kv_heads), (0, 0)))

    def without_padding(self, out: jax.Array) -> jax.Array:
        """[T, H', D] -> [T, H, D], the inverse of `pad_queries`."""
        if not self.has_padding:
            return out
        shape = (out.shape[0], self.padded_kv_heads, self.padded_group, out.shape[2])
        heads = out.reshape(shape)[:, : self.num_kv_heads, : self.group]
        return heads.reshape(out.shape[0], -1, out.shape[2])

    @property
    def has_padding(self) -> bool:
        padded = (self.padded_kv_heads, self.padded_group)
        return padded != (self.num_kv_heads, self.group)


def share_heads(num_heads: int, num_kv_heads: int, num_devices: int) -> HeadShares:
    """The least padding with which the heads divide. 14 query and 2 KV heads on 4 devices: each KV head is on two
    devices, which have four of its 8 query heads each; one is padding."""
    group, kv_heads = num_heads // num_kv_heads, num_kv_heads
    while kv_heads % num_devices and num_devices % kv_heads:
        kv_heads += 1
    copies = max(1, num_devices // kv_heads)
    return HeadShares(
        num_devices=num_devices,
        num_kv_heads=num_kv_heads,
        group=group,
        padded_kv_heads=kv_heads,
        padded_group=-(-group // copies) * copies,
    )
