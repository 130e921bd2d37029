"""What a step needs and what devices exchange in it, derived from the shapes of an engine, without compiling."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpage.aot.exchange import Collective
from jaxpage.engine_spec import EngineSpec
from jaxpage.parallel.heads import share_heads
from jaxpage.parallel.sharding import TENSOR
from jaxpage.weights.spec import ParamSpec, specs

EMBEDDING = "model.embed_tokens.weight"
MIB = 2**20


def exchange_of(spec: EngineSpec) -> list[Collective]:
    """What the devices exchange in a decode step: a sum after each product that is sharded over its inputs, and after
    the embedding; where heads do not divide evenly, the heads' attention outputs; then their shares of the logits, and
    the sampled tokens.

    XLA's own products are summed in float32 on GPUs. Those of int8 weights with a scale for each output first exchange
    the largest value of a row.
    """
    if spec.mesh is None or spec.num_devices == 1:
        return []
    model, num_devices = spec.model.config, spec.num_devices
    size, vocab = model.hidden_size, model.vocab_size
    itemsize = jnp.dtype(model.dtype).itemsize
    described = specs(spec.model)
    divided = {path: each for path, each in described.items() if _is_divided(each, spec.mesh)}
    products = [each for each in divided.values() if each.axes[0] == "embed"]
    # An EAGLE head without an embedding reads that of the engine's model; one with fewer tokens gathers their logits.
    has_shares = EMBEDDING in divided if EMBEDDING in described else vocab % num_devices == 0
    num_rounded = sum(_rounds_inputs(each, described) for each in products)
    product_itemsize = 4 if spec.hardware.platform == "gpu" else itemsize
    sums = [
        Collective("all-reduce", len(products), size * product_itemsize),
        Collective("all-reduce", int(has_shares), size * itemsize),
        Collective("all-reduce", num_rounded, 4),
    ]
    found = [each for each in sums if each.count] + _gathered_heads(spec, list(divided.values()))
    if model.eagle is not None and model.eagle.has_map:
        found.append(Collective("all-gather", 1, 4 * model.eagle.vocab_size))
    if vocab % num_devices == 0:
        found.append(Collective("all-to-all", 1, 4 * vocab / num_devices))
    # The token, its logprob and rank, and the top logprobs.
    sampled = 3 + 2 * spec.step_spec.num_top_logprobs
    return [*found, Collective("all-gather", 1, 4 * sampled)]


def _gathered_heads(spec: EngineSpec, divided: list[ParamSpec]) -> list[Collective]:
    """Where some heads are padding: q, k and v, if their weights are sharded, and the outputs of all heads."""
    model, itemsize = spec.model.config, jnp.dtype(spec.model.config.dtype).itemsize
    outputs = Counter[int]()  # bytes -> layers
    for layer in model.attention_layers:
        heads = model.kv_heads(layer)
        shares = share_heads(model.num_heads, heads.num, spec.num_devices)
        if shares.has_padding:
            num_heads = shares.num_devices * shares.query_heads_of_a_device
            outputs[num_heads * (model.value_dim or heads.head_dim) * itemsize] += 1
    if not outputs:
        return []
    found = [Collective("all-gather", count, size) for size, count in outputs.items()]
    projections = [
        each
        for each in divided
        if each.axes[0] in ("heads", "kv_heads") and _is_of_attention(each.path)
    ]
    return found + [Collective("all-gather", 1, each.shape[0] * itemsize) for each in projections]


def _is_of_attention(path: str) -> bool:
    """Whether a parameter is of attention. Heads of Mamba-2, which may be a `mixer` too, have the same axis."""
    return ".self_attn." in path or (".mixer." in path and ".in_proj_" not in path)


def most_temp_bytes(spec: EngineSpec) -> int:
    """An empirical upper bound for a step of any model on any chip: some arrays as large as a device's share of the
    logits, and some as large as the widest layer's results for all tokens. On a GPU, XLA keeps more of them alive at
    once, and gathered arrays too.
    """
    logits = 4 * spec.config.max_num_seqs * spec.model.config.vocab_size // spec.num_devices
    return 10 * logits + most_temp_bytes_of_layers(spec)


def most_temp_bytes_of_layers(spec: EngineSpec) -> int:
    """The same of a step without logits."""
    model, is_gpu = spec.model.config, spec.hardware.platform == "gpu"
    widest = model.intermediate_size
    if model.latent is not None:  # queries of all heads, in the latents' space
        widest = max(widest, model.num_heads * model.head_dim)
    results = 2 * spec.config.max_num_batched_tokens * widest // spec.num_devices
    most = (10 if is_gpu else 4) * results + model.num_layers * 2 * MIB
    return most + (512 if is_gpu else 64) * MIB


def _is_divided(parameter: ParamSpec, mesh: Mesh) -> bool:
    """Whether devices have different parts of a matrix. Scales and zeros of quantised weights are none."""
    where = parameter.sharding(mesh)
    assert isinstance(where, NamedSharding)
    is_matrix = len(parameter.axes) == 2 and parameter.num_weights > 0
    return is_matrix and TENSOR in tuple(where.spec)


def _rounds_inputs(weight: ParamSpec, described: dict[str, ParamSpec]) -> bool:
    """`QuantizedWeight.rounds_x` of a linear layer's weight."""
    if weight.dtype != jnp.int8:
        return False
    scale = described[weight.path.removesuffix("weight") + "scale"]
    return len(scale.axes) == 1
