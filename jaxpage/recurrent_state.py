"""What an engine does without if some layers of its model have a recurrent state.

A state is of all tokens so far. Blocks of keys and values can be shared, found again and moved, one by one; a state
is kept for running sequences only, and only its last version.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.config import ResolvedConfig
from jaxpage.models.config import GatedDelta, ModelConfig

_MOST_STATES = 0.2  # of a device's memory, for the states of sequences


def with_recurrent_state(
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    num_seqs: int | None,
    device_bytes: int,
    num_devices: int,
) -> ResolvedConfig:
    """The config for such a model has no prefix cache, and if the user set no `max_num_seqs` (num_seqs) only as many
    sequences as have their states in a part of the memory, `device_bytes` on each device; else it is unchanged.

    Raises ValueError for what needs earlier states, or states outside the device.
    """
    if model.gated_delta is None:
        return config
    reasons = {
        "speculative_config": (
            config.speculative_config is not None,
            "wrong drafts would have to be taken back from the state",
        ),
        f"swap_space={config.swap_space}": (
            config.swap_space > 0,
            "the state stays on the device, and preempted sequences are computed again",
        ),
    }
    for option, (is_given, why) in reasons.items():
        if is_given:
            raise ValueError(
                f"{option} is not for {model.architecture}, whose layers have a recurrent state: {why}; leave it out"
            )
    if num_seqs is None:
        # See `runner.recurrence.recurrent_axes`.
        shares = 1 if model.gated_delta.num_key_heads % num_devices else num_devices
        most = int(_MOST_STATES * device_bytes) * shares
        fitting = most // sequence_bytes(model.gated_delta, model.dtype)
        num_seqs = min(config.max_num_seqs, 1 << max(fitting, 1).bit_length() - 1)
    return replace(config, enable_prefix_caching=False, max_num_seqs=num_seqs)


def sequence_bytes(sizes: GatedDelta, dtype: DTypeLike) -> int:
    """Bytes of the state of one sequence in all layers."""
    state = 4 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim
    inputs = jnp.dtype(dtype).itemsize * (sizes.num_taps - 1) * sizes.num_channels
    return len(sizes.layers) * (state + inputs)
