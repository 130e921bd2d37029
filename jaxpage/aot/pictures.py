"""What an encoder of pictures adds to a plan: weights that only pictures pass, and temporaries of the largest one.

From the shapes of an engine alone. Of models without pictures all of it is nothing.
"""

from __future__ import annotations

import math

from jaxpage.engine_spec import EngineSpec
from jaxpage.weights.spec import specs

ENCODER = "visual."  # what the names of its parameters begin with
MB = 10**6


def numbers_of_encoder(spec: EngineSpec) -> dict[str, int] | None:
    """Parameters of the encoder, their bytes on a device, and the patches of the largest picture that it takes."""
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
    """That no encoder was seen to exceed, whose layers have up to 4,304 values of a patch."""
    return 100 * MB + 60_000 * num_patches
