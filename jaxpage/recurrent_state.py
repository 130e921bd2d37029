"""What an engine does without if some layers of its model have a recurrent state.

A state is of all tokens so far. Blocks of keys and values can be shared, found again and moved, one by one; a state
is kept for running sequences only, and only its last version.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpage.config import ResolvedConfig
from jaxpage.models.config import ModelConfig


def with_recurrent_state(config: ResolvedConfig, model: ModelConfig) -> ResolvedConfig:
    """The config without a prefix cache for such a model, else unchanged. Raises ValueError for what needs earlier
    states, or states outside the device.
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
    return replace(config, enable_prefix_caching=False)
