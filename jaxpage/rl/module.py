"""A model of jaxpage's own to train: dense and differentiable. A `Sampler` binds to it without a copy."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.weights.load import load


def load_module(
    model: str,
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    mesh: Mesh | None = None,
) -> CausalLM:
    """The NNX module of a checkpoint, a folder or a name on the Hugging Face hub, with its parameters in `dtype`.

    `module(token_ids)` is float32[..., T, V], dense and differentiable. `max_model_len`: the sampler's, if it differs
    from config.json's; some RoPE types depend on it. Raises ValueError for a checkpoint that cannot be read.
    """
    options = EngineConfig(model=model, dtype=dtype, max_model_len=max_model_len).with_local_files()
    hf_config = load_hf_config(options.hf_config_path or options.model, None)
    config = options.resolve(hf_config, platform="cpu")
    sizes = {"dtype": config.dtype, "max_model_len": config.max_model_len}
    # Without a vision tower, which a call on tokens alone would give no gradients.
    module = registry.build(hf_config, **sizes, pictures=False)
    return load(module, config.model, mesh=mesh, use_tqdm=False)
