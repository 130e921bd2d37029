"""The abstract model of a checkpoint, whose quantised layers have the parameters of quantised weights.

Knows config.json and what the `quantization` option may be. Reads no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.weights.load import quantization_of_checkpoint
from jaxpage.weights.quantization import Quantization
from jaxpage.weights.quantized_layers import declare

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.config import ResolvedConfig

# vLLM's names of kernels, and of what is rounded after loading -> the method
_METHODS = {"awq_marlin": "awq", "gptq_marlin": "gptq"} | dict.fromkeys(
    ("fp8_per_tensor", "fp8_per_channel"), "fp8"
)


def abstract_model(
    hf_config: PretrainedConfig, config: ResolvedConfig, mesh: Mesh | None
) -> tuple[CausalLM, str | None, Quantization | None]:
    """The model, to be on one device or divided over `mesh`; what `config.quantization` resolves to: None becomes
    the checkpoint's own method, if there is one; and which layers compute with quantised weights of a checkpoint: None
    if they are floats, which "int8" and "fp8" round after loading.

    Raises ValueError for what is not supported, and for another method than the checkpoint's.
    """
    return with_own_quantization(
        with_layers(hf_config, config, mesh, None), hf_config, config, mesh
    )


def with_own_quantization(
    model: CausalLM, hf_config: PretrainedConfig, config: ResolvedConfig, mesh: Mesh | None
) -> tuple[CausalLM, str | None, Quantization | None]:
    """The same of an abstract model of this checkpoint, in place."""
    quantization = _METHODS.get(config.quantization or "", config.quantization)
    found = quantization_of_checkpoint(model.config, hf_config, config.model)
    if quantization in ("int8", "dequantize"):  # of floats, which weights are dequantised to
        return model, quantization, None
    method = None if found is None else found.method
    if quantization == "fp8" and found is None:
        return model, quantization, None
    if quantization not in (None, method):
        raise ValueError(
            f"quantization={config.quantization!r}, but according to config.json the weights are "
            f'{"not quantised" if method is None else method}; leave it out. "int8" rounds linear layers, "fp8" those '
            'of a checkpoint that is not quantised; "dequantize" computes with floats'
        )
    if found is not None:
        declare(model, found, mesh)
    return model, method, found


def with_layers(
    hf_config: PretrainedConfig,
    config: ResolvedConfig,
    mesh: Mesh | None,
    quantised: Quantization | None,
) -> CausalLM:
    """The model with these quantised layers, whatever the checkpoint is by now."""
    sizes: dict[str, Any] = {"dtype": config.dtype, "max_model_len": config.max_model_len}
    model = registry.build(hf_config, **sizes, pictures=config.takes_pictures)
    if quantised is not None:
        declare(model, quantised, mesh)
    return model
