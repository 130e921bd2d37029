"""What an engine does without if some layers of its model have a recurrent state, how many states it has room for, and
which kernel changes them.

A state is of all tokens so far. Blocks of keys and values can be shared, found again and moved, one by one; a running
sequence has only its last state, and the prefix cache has some copies (`engine.state_cache`).
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.config import ResolvedConfig
from jaxpage.device import Device
from jaxpage.models.config import ModelConfig
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.ops import state_kernel
from jaxpage.ops.implementations import Choice
from jaxpage.ops.packed_delta_rule import MOST_DRAFTS

# Of a device's memory:
_MOST_STATES = 0.2  # for the states of sequences
_MOST_CACHED = 0.1  # for those in the prefix cache


def with_recurrent_state(
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    num_seqs: int | None,
    device_bytes: int,
    num_devices: int,
) -> ResolvedConfig:
    """The config for such a model: if the user set no `max_num_seqs` (num_seqs) it has only as many sequences as have
    their states in a part of the memory, `device_bytes` on each device. Others are unchanged.

    Raises ValueError for what needs states outside the device, and for more drafts than `MOST_DRAFTS`.
    """
    if model.recurrent is None:
        return config
    if config.swap_space > 0:
        raise ValueError(
            f"swap_space={config.swap_space} is not for {model.architecture}, whose layers have a recurrent state: it "
            "stays on the device, and preempted sequences are computed again; leave it out"
        )
    if config.num_drafts > MOST_DRAFTS:
        raise ValueError(
            f"num_speculative_tokens={config.num_drafts} of speculative_config is too many for {model.architecture}, "
            f"whose layers have a recurrent state: at most {MOST_DRAFTS}"
        )
    if num_seqs is None:
        fitting = _num_fitting(_MOST_STATES, config, model, device_bytes, num_devices)
        num_seqs = min(config.max_num_seqs, fitting)
    return replace(config, max_num_seqs=num_seqs)


def num_cached_states(
    config: ResolvedConfig, model: ModelConfig, *, device_bytes: int, num_devices: int
) -> int:
    """States in the prefix cache: a power of two that fits in a part of the memory, at most two for each running
    sequence, which keeps two when it begins. 0 without prefix cache, or if the model has no such state.
    """
    if model.recurrent is None or not config.enable_prefix_caching:
        return 0
    fitting = _num_fitting(_MOST_CACHED, config, model, device_bytes, num_devices)
    return min(fitting, 2 * config.max_num_seqs)


def choose_kernel(model: ModelConfig, device: Device, *, num_devices: int) -> Choice[str | None]:
    """What changes the states of rows with one token, see `ops.state_kernel`; XLA if the model has no such state, or
    only inputs of convolutions.
    """
    sizes = model.recurrent
    if sizes is None or not sizes.has_matrix:
        return Choice("xla", None)
    num_keys, *others = sizes.state_shape
    share = num_keys if num_keys % num_devices else num_keys // num_devices
    is_mamba = sizes.mamba is not None
    return state_kernel.choose((share, *others), sizes.values_per_key, device, is_mamba=is_mamba)


def _num_fitting(
    part: float, config: ResolvedConfig, model: ModelConfig, device_bytes: int, num_devices: int
) -> int:
    """How many states have room in a part of the memory of each device: the largest power of two, at least 1. So hosts
    with a little more or less memory have the same number.
    """
    assert model.recurrent is not None
    # See `runner.recurrence.recurrent_axes`.
    shares = 1 if model.recurrent.num_key_heads % num_devices else num_devices
    most = int(part * device_bytes) * shares
    size = sequence_bytes(model.recurrent, model.dtype, num_drafts=config.num_drafts)
    # Convolutions of one tap keep nothing.
    return 1 << max(most // max(size, 1), 1).bit_length() - 1


def sequence_bytes(sizes: RecurrentLayers, dtype: DTypeLike, *, num_drafts: int) -> int:
    """Bytes of the state of one sequence in all layers, with what is kept of its drafts."""
    state = 4 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim
    num_inputs = sizes.num_taps - 1 + num_drafts
    inputs = jnp.dtype(dtype).itemsize * num_inputs * sizes.num_channels
    return len(sizes.layers) * (state + inputs + 4 * num_drafts * sizes.num_changes)
