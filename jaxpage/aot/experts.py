"""What a mixture of experts adds to a plan: parameters that a token uses in part, a sum over devices, temporaries.

Derived from the shapes of an engine alone. Models without experts add nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxpage.aot.exchange import Collective
from jaxpage.aot.pictures import ENCODER
from jaxpage.engine_spec import EngineSpec
from jaxpage.models.decoder import CausalLM
from jaxpage.models.experts import MixtureOfExperts
from jaxpage.weights.spec import ParamSpec, specs


def numbers_of(spec: EngineSpec) -> dict[str, int] | None:
    """What `estimate` needs: how many of a layer's experts a token uses, the experts' bytes on a device, and how many
    parameters the model has in all and a token uses. None for a model without experts.
    """
    experts = spec.model.config.experts
    if experts is None:
        return None
    described, weights = specs(spec.model), spec.weight_bytes
    return {
        "num_experts": experts.num_experts,
        "experts_per_token": experts.experts_per_token,
        "weight_bytes": sum(weights[path] for path in weights if _is_of_experts(described[path])),
        "num_parameters": sum(each.num_weights for each in described.values()),
        "num_active": num_active(spec.model),
    }


def num_active(model: CausalLM) -> int:
    """Parameters that a token uses, including the whole embedding but not a picture encoder."""
    experts, total = model.config.experts, 0
    for path, each in specs(model).items():
        if path.startswith(ENCODER):
            continue
        count = each.num_weights
        if experts is not None and _is_of_experts(each):
            count = count * experts.experts_per_token // experts.num_experts
        total += count
    return total


def exchange_of_experts(spec: EngineSpec) -> list[Collective]:
    """What devices exchange in a decode step in addition to `steps.exchange_of`: a sum for each layer with experts."""
    model, num_devices = spec.model.config, spec.num_devices
    experts = model.experts
    if experts is None or num_devices == 1 or experts.num_experts % num_devices:
        return []
    size = experts.latent_size or model.hidden_size
    num_bytes = size * jnp.dtype(model.dtype).itemsize
    return [Collective("all-reduce", len(experts.layers), num_bytes)]


def temp_bytes_of_experts(spec: EngineSpec) -> int:
    """In addition to `steps.most_temp_bytes`. Each device has a row for each expert of each token, however many devices
    share the experts: all rows may be of its own. At the most it holds the rows, their products with gate and up, and
    the activations; or activations and products with down, and on a TPU these in the order of tokens as well. Products
    are float32; without a kernel, XLA has those with gate and up twice.
    """
    model = spec.model.config
    experts = model.experts
    if experts is None:
        return 0
    itemsize = jnp.dtype(model.dtype).itemsize
    size, inner = experts.latent_size or model.hidden_size, experts.intermediate_size
    products = 4 * (2 * inner if experts.has_gate else inner)
    times = 1 if _has_kernel(spec.model) else 2
    before = itemsize * (size + inner) + times * products
    after = itemsize * inner + (1 if spec.hardware.platform == "gpu" else 2) * 4 * size
    num_rows = spec.config.max_num_batched_tokens * experts.experts_per_token
    return num_rows * max(before, after)


def _has_kernel(model: CausalLM) -> bool:
    """Whether a kernel multiplies the experts, in all layers."""
    mixtures = (m for _, m in nnx.iter_modules(model) if isinstance(m, MixtureOfExperts))
    return all(each.kernel.platform is not None for each in mixtures)


def _is_of_experts(parameter: ParamSpec) -> bool:
    """A parameter with an entry for each expert."""
    return parameter.axes[0] == "experts"
