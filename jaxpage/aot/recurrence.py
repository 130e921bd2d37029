"""What layers with a recurrent state add to a plan: bytes of each row's state, flops of the delta rule, temporaries.

Derived from the shapes of an engine alone. Models without such layers add nothing.

Letters: N key heads, J value heads for each, D key dim, F value dim, C tokens of a chunk.
"""

from __future__ import annotations

import math

from jaxpage.engine_spec import EngineSpec
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.ops.delta_rule import CHUNK
from jaxpage.ops.packed_delta_rule import window_of_drafts
from jaxpage.recurrent_state import sequence_bytes
from jaxpage.runner.recurrence import recurrent_axes


def numbers_of_recurrence(spec: EngineSpec) -> dict[str, int] | None:
    """What `estimate` needs, of one device: bytes of a sequence's state in all layers, which a decode step reads and
    writes; how many more the prefix cache has; flops per token of a decode step and of a prompt, without those of
    convolutions. None for a model without recurrent state.
    """
    model = spec.model.config
    sizes = model.recurrent
    if sizes is None:
        return None
    shares, layers = _shares(spec, sizes), len(sizes.layers)
    return {
        "sequence_bytes": sequence_bytes(sizes, model.dtype, num_drafts=spec.config.num_drafts)
        // shares,
        "num_cached": spec.step_spec.num_cached_states,
        "flops_per_token": layers * flops_of_a_token(sizes) // shares,
        "flops_in_prompts": layers * flops_in_a_chunk(sizes) // shares,
    }


def flops_of_a_token(sizes: RecurrentLayers) -> int:
    """Of `ops.delta_rule` for one token in one layer: 7 N J D F. The state decays (1), is multiplied by the key (2), is
    corrected (2), and is multiplied by the query (2). Mamba-2 corrects nothing: 5 N J D F.
    """
    number = 7 if sizes.mamba is None else 5
    return number * sizes.num_value_heads * sizes.key_dim * sizes.value_dim


def flops_in_a_chunk(sizes: RecurrentLayers) -> int:
    """The same for each token of a chunk: 4 N C D for the products of keys with keys and queries, and for each of N J
    heads 4 C^2 log2(C) for the inverse, 2 C (F + D) for its products with values and keys, 6 D F for those with the
    state, and 2 C F for that of scores and values. Mamba-2: 2 N C D for keys with queries, and 2 C F and 4 D F.
    """
    if not sizes.has_matrix:
        return 0
    chunk, keys, values = CHUNK, sizes.key_dim, sizes.value_dim
    if sizes.mamba is not None:
        of_a_head = 2 * chunk * values + 4 * keys * values
        return 2 * sizes.num_key_heads * chunk * keys + sizes.num_value_heads * of_a_head
    inverse = 4 * chunk**2 * int(math.log2(chunk))
    of_a_head = inverse + 2 * chunk * (2 * values + keys) + 6 * keys * values
    return 4 * sizes.num_key_heads * chunk * keys + sizes.num_value_heads * of_a_head


def temp_bytes_of_recurrence(spec: EngineSpec) -> int:
    """In addition to `steps.most_temp_bytes`: what a step prepares of all chunks, in float32, and results. With drafts
    each row has a window beside them, whatever its length.
    """
    sizes = spec.model.config.recurrent
    if sizes is None or not sizes.has_matrix:
        return 0
    of_a_head = 4 * (sizes.key_dim + sizes.value_dim + CHUNK)
    num_tokens = spec.config.max_num_batched_tokens + CHUNK
    if num_drafts := spec.config.num_drafts:
        num_tokens += spec.config.max_num_seqs * window_of_drafts(num_drafts)
    return 4 * num_tokens * sizes.num_value_heads * of_a_head // _shares(spec, sizes)


def _shares(spec: EngineSpec, sizes: RecurrentLayers) -> int:
    """Among how many devices the heads are divided."""
    return spec.num_devices if recurrent_axes(sizes, spec.num_devices) else 1
