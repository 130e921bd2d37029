"""What a picture encoder adds to a plan: weights that only pictures use, and temporaries of the largest picture.

Derived from the shapes of an engine alone. Models without pictures add nothing.
"""

from __future__ import annotations

import math

from jaxpage.engine_spec import EngineSpec
from jaxpage.weights.spec import specs

ENCODER = "visual."  # prefix of the names of its parameters
MB = 10**6


def numbers_of_encoder(spec: EngineSpec) -> dict[str, int] | None:
    """Parameters of the encoder, their bytes on a device, and the patches of the largest picture that it accepts."""
    pictures = spec.picture_spec
    if pictures is None:
        return None
    described, weights = specs(spec.model), spec.weight_bytes
    paths = [path for path in described if path.startswith(ENCODER)]
    return {
        "num_parameters": sum(math.prod(described[path].shape) for path in paths),
        "weight_bytes": sum(weights[path] for path in paths),
        "largest": pictures.sizes[-1],
    }


def temp_bytes_of_encoder(num_patches: int) -> int:
    """An empirical upper bound, for encoders whose layers have up to 4,304 values per patch."""
    return 100 * MB + 60_000 * num_patches
