"""Which heads are on which device."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.parallel.heads import share_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "of_a_device", "kv_heads_of_a_device"),
    [
        (14, 2, 1, 14, 2),
        (32, 8, 4, 8, 2),  # Llama 3.1 8B
        (32, 8, 8, 4, 1),
        (32, 8, 16, 2, 1),  # each KV head on two devices
        (14, 2, 2, 7, 1),  # Qwen2.5 0.5B
        (14, 2, 4, 4, 1),  # 7 query heads of a KV head on two devices: one is padding
        (14, 2, 8, 2, 1),
        (28, 4, 8, 4, 1),  # Qwen2.5 7B
        (40, 10, 4, 12, 3),  # Phi 4: two KV heads are padding
        (40, 10, 8, 8, 2),
        (40, 10, 16, 4, 1),
        (6, 3, 4, 2, 1),  # a device has padding only
        (6, 3, 8, 1, 1),
        (71, 1, 4, 18, 1),
        (4, 4, 8, 1, 1),  # fewer heads than devices
    ],
)
def test_heads_of_a_device(heads, kv_heads, devices, of_a_device, kv_heads_of_a_device):
    shares = share_heads(heads, kv_heads, devices)
    assert shares.query_heads_of_a_device == of_a_device
    assert shares.kv_heads_of_a_device == kv_heads_of_a_device
    assert shares.query_heads_of_a_device % shares.kv_heads_of_a_device == 0


def test_no_device_reads_more_than_without_sharing_nor_much_more_than_its_share():
    for kv_heads in range(1, 33):
        for group in (1, 2, 3, 4, 7, 8):
            for devices in range(1, 33):
                shares = share_heads(kv_heads * group, kv_heads, devices)
                assert shares.kv_heads_of_a_device <= kv_heads
                assert shares.kv_heads_of_a_device - 1 < max(1, kv_heads / devices)
                assert shares.padded_kv_heads >= kv_heads and shares.padded_group >= group
                assert shares.of_pool % devices == 0


@pytest.mark.parametrize(("heads", "kv_heads", "devices"), [(14, 2, 4), (6, 3, 4), (8, 4, 2)])
def test_padding_comes_and_goes(heads, kv_heads, devices):
    shares = share_heads(heads, kv_heads, devices)
    q = jnp.arange(2 * heads * 3.0).reshape(2, heads, 3) + 1
    padded = shares.pad_queries(q)
    assert padded.shape[1] == devices * shares.query_heads_of_a_device
    assert np.count_nonzero(padded) == q.size
    np.testing.assert_array_equal(shares.without_padding(padded), q)
    assert shares.pad_kv(q[:, :kv_heads]).shape[1] == shares.padded_kv_heads
