"""Models with multi-head latent attention: what their configs say, and what of them is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import pytest
import transformers

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.models.config import KVHeads, LatentSizes, ModelConfig
from jaxpage.models.registry import build
from jaxpage.weights.spec import specs

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def config(kind: str, architecture: str, **options: Any) -> ModelConfig:
    hf = getattr(transformers, kind)(architectures=[architecture], **options)
    return build(hf, dtype="bfloat16", max_model_len=4096).config


def v2(**options: Any) -> ModelConfig:
    chosen = {"num_experts_per_tok": 6} | options  # which transformers' defaults leave open
    return config("DeepseekV2Config", "DeepseekV2ForCausalLM", **chosen)


def v3(**options: Any) -> ModelConfig:
    return config("DeepseekV3Config", "DeepseekV3ForCausalLM", **options)


def glm(**options: Any) -> ModelConfig:
    return config("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", **options)


def test_a_token_has_one_key_of_a_latent_and_a_rotated_key():
    found = v3()
    assert found.latent == LatentSizes(
        query_rank=1536, rank=512, plain_dim=128, rotated_dim=64, value_dim=128
    )
    assert found.kv_heads(0) == KVHeads(1, 576) and found.value_dim == 512
    assert found.num_heads == 128 and len(found.ropes[0].inv_freq) == 32
    assert found.ropes[0].interleaved and not v3(rope_interleave=False).ropes[0].interleaved


def test_scores_grow_with_the_context_of_yarn():
    """transformers' yarn_apply_mscale; cos and sin do not grow, as both weights are equal."""
    plain = v2(q_lora_rank=None)
    assert plain.attention_scale == 192**-0.5
    longer = v2(rope_parameters=YARN)
    growth = 0.1 * 0.707 * math.log(40) + 1
    assert longer.attention_scale == pytest.approx(192**-0.5 * growth**2)
    assert longer.ropes[0].scale == 1.0
    assert v2(rope_parameters=YARN | {"mscale_all_dim": 0.0}).attention_scale == 192**-0.5


def test_which_layers_have_experts_and_how_they_are_chosen():
    experts = v2(first_k_dense_replace=2, num_hidden_layers=4).experts
    assert experts is not None and experts.layers == (2, 3)
    # Groups that greedy choice does not know.
    assert experts.routing.num_groups == 1 and experts.routing.scores == "softmax"
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    experts = v2(routed_scaling_factor=16.0, **grouped).experts
    assert experts is not None and (experts.routing.num_best, experts.routing.factor) == (1, 16.0)
    # One of each group, and greedy choice with groups that it does not read.
    experts = v2(topk_method="group_limited_greedy", n_group=64, topk_group=8).experts
    assert experts is not None and (experts.routing.num_groups, experts.routing.chosen_groups) == (
        64,
        8,
    )
    experts = v2(n_group=7, topk_group=9).experts
    assert experts is not None and experts.routing.num_groups == 1
    assert v2(first_k_dense_replace=32).experts is None
    for make, options in ((v2, {"num_hidden_layers": 4}), (v3, {"num_hidden_layers": 4})):
        experts = make(first_k_dense_replace=-1, **options).experts
        assert experts is not None and experts.layers == (0, 1, 2, 3)
    experts = v3().experts
    assert experts is not None and experts.layers == tuple(range(3, 61))
    assert (experts.routing.num_groups, experts.routing.num_best) == (8, 2)
    experts = glm().experts
    assert experts is not None and experts.layers == tuple(range(1, 47))


def test_kimi_k2_is_a_deepseek_v3(tmp_path):
    values = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "n_group": 1}
    values |= {"topk_group": 1, "n_routed_experts": 384}
    values |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf = load_hf_config(str(tmp_path))
    assert hf.model_type == "deepseek_v3"
    found = build(hf, dtype="bfloat16").config
    assert found.experts is not None and found.experts.num_experts == 384
    assert found.num_heads == 64 and found.latent is not None


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (v2, {"norm_topk_prob": True}, "norm_topk_prob is true in config.json"),
        (v2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc' .* supported are 'greedy'"),
        (v3, {"moe_layer_freq": 2}, "moe_layer_freq is 2 in config.json.* released models have 1"),
        (v3, {"kv_lora_rank": 0}, "kv_lora_rank is 0 in config.json; it must be a positive"),
        (v3, {"q_lora_rank": 0}, "q_lora_rank is 0 in config.json; it must be a positive"),
        (v3, {"n_group": 7}, "256 experts cannot be in 7 equal groups of at least 2"),
        (v3, {"head_dim": 192}, "head_dim is 192 in config.json; .* qk_rope_head_dim, 64"),
        (
            v3,
            {"moe_intermediate_size": 0},
            "experts of 0 and a shared one of None: check their int",
        ),
        (
            v3,
            {"n_shared_experts": -1},
            "experts of 2048 and a shared one of -2048: check their int",
        ),
        (
            v3,
            {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": "much"}},
            "mscale_all_dim is 'much' and factor 40.0 in rope_parameters; both must be numbers",
        ),
        (glm, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25 .* model needs 1"),
        (
            glm,
            {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            "mlp_layer_types must be 'dense' for the first of 3 layers .* has sparse, dense",
        ),
    ],
)
def test_what_is_not_supported_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def spec_of(folder, **options: Any) -> EngineSpec:
    values = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **SIZES}
    (folder / "config.json").write_text(json.dumps(values))
    fixed = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    given = fixed | {"skip_tokenizer_init": True, "dtype": "bfloat16", "block_size": 16} | options
    engine = EngineConfig.from_options(model=str(folder), **given)
    return make_engine_spec(engine, device=jax.local_devices()[0])


def test_biases_of_mlps_are_those_that_transformers_has():
    """Its MLPs of V3 and of GLM-4.7 have none, whatever config.json says."""
    assert v2(mlp_bias=True).mlp_bias
    assert not v3(mlp_bias=True).mlp_bias and not glm(mlp_bias=True).mlp_bias


def test_a_pool_has_latents_alone(tmp_path):
    """A token has 576 numbers in a layer, and not 4 heads of 192 + 128."""
    spec = spec_of(tmp_path).with_blocks(5)
    (first, _) = spec.pool.abstract()
    assert first.shape == (5, 16, 576)
    assert spec.block_bytes == 2 * 16 * 576 * 2
    assert spec.attention.startswith("plain XLA: ")
    spec = spec_of(tmp_path, kv_cache_dtype="fp8").with_blocks(5)
    assert spec.pool.format == "fp8_e4m3" and spec.block_bytes == 2 * 16 * 576


def test_parameters_have_the_names_of_checkpoints(tmp_path):
    found = specs(spec_of(tmp_path).model)
    of_attention = {path.partition(".self_attn.")[2] for path in found if ".0.self_attn." in path}
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
    assert of_attention == {f"{name}.weight" for name in (*names, "kv_b_proj", "o_proj")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not supported with multi-head lat"),
        (
            {"kv_cache_dtype": "int4"},
            'attention: one scale would .* take "fp8", which has no scales',
        ),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype must be one of .*, got 'fp8_ds_mla'"),
        ({"numerics": "strict"}, "is not for .*models with multi-head latent attention"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_weights_are_read(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        spec_of(tmp_path, **options)


def test_what_int8_leaves_as_floats(tmp_path):
    """The weight that is multiplied by queries and by sums of latents."""
    spec = spec_of(tmp_path, quantization="int8")
    spec.transform_weights()
    dtypes = {path: each.dtype.name for path, each in specs(spec.model).items()}
    layer = "model.layers.0.self_attn"
    assert dtypes[f"{layer}.q_b_proj.weight"] == dtypes[f"{layer}.o_proj.weight"] == "int8"
    assert dtypes[f"{layer}.kv_b_proj.weight"] == "bfloat16"
