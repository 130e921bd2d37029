"""The kinds of attention in a model's layers, which differ in windows and heads. Layers with a recurrent state have
none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jaxpage.engine_spec import EngineSpec
from jaxpage.models.config import KVHeads
from jaxpage.ops.attention import Heads, layer_on_device
from jaxpage.parallel.heads import share_heads
from pallas_kernels.paged_attention import tpu_choose, tpu_shape


def attention_kinds(spec: EngineSpec) -> list[dict[str, Any]]:
    """Of each kind: its window in tokens, or None; how many layers; of a device's query heads together the width of
    their outputs, and the flops of a query and a key that it sees; `tiles_of` the TPU attention kernel in decode and
    other steps, and of rows with drafts if they have tiles of their own; None without the kernel.
    """
    model = spec.model.config
    kinds = Counter((model.windows[i], model.kv_heads(i)) for i in model.attention_layers)
    found = []
    for (window, heads), count in kinds.items():
        num_heads = share_heads(
            model.num_heads, heads.num, spec.num_devices
        ).query_heads_of_a_device
        value_dim = model.value_dim or heads.head_dim
        found.append(
            {
                "window": window,
                "layers": count,
                "width": num_heads * value_dim,
                "flops": 2 * num_heads * (heads.head_dim + value_dim),
                "tiles": _tiles(spec, heads),
            }
        )
    return found


def _tiles(spec: EngineSpec, heads: KVHeads) -> dict[str, dict[str, Any]] | None:
    sizes, model = spec.pool.kernel_sizes, spec.model.config
    if not isinstance(sizes, tpu_shape.TileSizes):
        return None
    shares = share_heads(model.num_heads, heads.num, spec.num_devices)
    q, pool, num_kv_heads = layer_on_device(spec.pool, Heads(shares, heads.head_dim))
    blocks = -(-spec.config.max_model_len // spec.pool.block_size)
    shapes = {
        step: tpu_choose.shape_of(
            q, pool, num_kv_heads, blocks, sizes=sizes, one_query_per_row=step == "decode"
        )
        for step in ("decode", "prefill")
    }
    drafts = tpu_choose.shape_with_drafts(shapes["prefill"], spec.pool.num_drafts)
    shapes |= {"drafts": drafts} if drafts else {}
    return {step: tiles_of(shape) for step, shape in shapes.items()}


def tiles_of(shape: tpu_shape.Shape) -> dict[str, Any]:
    """The sizes of `attention_time.Rows`."""
    names = ("tile_q", "tile_tokens", "tile_kv", "fetch_kv", "block_size", "one_tile_per_row")
    sizes = {name: getattr(shape, name) for name in names}
    return sizes | {"write_sizes": tuple(tpu_shape.write_sizes(shape))}
