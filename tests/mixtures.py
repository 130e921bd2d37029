"""Tiny checkpoints of the families with experts.

Their variants stand apart from `checkpoints.VARIANTS`, over which most tests of families run: with five more these
would take too long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import checkpoints
from tests.checkpoints import shape
from tests.dense_families import (
    CONVOLUTION,
    LINEAR,
    RECURRENT,
    gemma4,
    granite_hybrid,
    lfm2,
    multipliers,
    nemotron_h,
    qwen3_5,
)

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PARTIAL = DEFAULT | {"partial_rotary_factor": 0.25}
_OSS_ROPE = YARN | {"rope_theta": 150_000.0, "truncate": False}


def qwen(num_experts: int, chosen: int, **other: Any) -> dict[str, Any]:
    return {"num_experts": num_experts, "num_experts_per_tok": chosen, **other}


def deepseek(num_experts: int, chosen: int, size: int, **other: Any) -> dict[str, Any]:
    """Experts of `size` under DeepSeek-V3's names, which several families have."""
    sizes = {"n_routed_experts": num_experts, "moe_intermediate_size": size}
    return {**sizes, "num_experts_per_tok": chosen, **other}


def latent(
    rank: int, plain: int, rotated: int, values: int, *, queries: int | None, **other: Any
) -> dict[str, Any]:
    """Dims of multi-head latent attention. queries: of their latent."""
    dims = {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "v_head_dim": values}
    return {"kv_lora_rank": rank, "q_lora_rank": queries, **dims, **other}


def ernie(num_experts: int, chosen: int, shared: int, size: int, **other: Any) -> dict[str, Any]:
    sizes = {"moe_num_experts": num_experts, "moe_k": chosen, "moe_num_shared_experts": shared}
    return {**sizes, "moe_intermediate_size": size, **other}


# They differ in heads and RoPE, in the number of experts and which layers have them, in what becomes of shares.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [
        shape(4, 2, num_local_experts=4, rope_parameters=DEFAULT),
        shape(
            4,
            1,
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=20,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            4,
            hidden=64,
            layers=3,
            head_dim=8,  # transformers' YaRN wants to be told
            num_local_experts=6,
            num_experts_per_tok=1,
            rope_parameters=YARN,
        ),
    ],
    "qwen2_moe": [
        shape(
            4,
            2,
            **qwen(6, 2, moe_intermediate_size=24, shared_expert_intermediate_size=40),
            rope_parameters=DEFAULT,
        ),
        shape(
            4,
            4,
            layers=4,
            **qwen(8, 4, moe_intermediate_size=20, shared_expert_intermediate_size=12),
            decoder_sparse_step=2,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            2,
            hidden=64,
            layers=3,
            **qwen(5, 5, moe_intermediate_size=16, shared_expert_intermediate_size=72),
            mlp_only_layers=[1],
            qkv_bias=False,
            rope_parameters=YARN,
        ),
    ],
    "qwen3_moe": [
        shape(
            4,
            2,
            head_dim=16,
            **qwen(8, 2, moe_intermediate_size=24),
            norm_topk_prob=True,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            2,
            hidden=64,
            head_dim=8,
            **qwen(16, 3, moe_intermediate_size=20),
            mlp_only_layers=[0],
            attention_bias=True,
            rope_parameters=YARN,
        ),
        shape(
            4,
            4,
            layers=4,
            head_dim=20,
            **qwen(4, 4, moe_intermediate_size=28),
            decoder_sparse_step=2,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=10,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
    ],
    "olmoe": [
        shape(4, 4, **qwen(8, 2), rope_parameters=DEFAULT),
        shape(
            4,
            2,
            **qwen(4, 3),
            norm_topk_prob=True,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
        shape(
            8, 2, hidden=64, layers=3, **qwen(16, 4), attention_bias=True, rope_parameters=DEFAULT
        ),
    ],
    "glm4_moe": [
        shape(
            4,
            2,
            head_dim=16,
            **deepseek(8, 2, 24, n_shared_experts=1),
            use_qk_norm=True,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            2,
            hidden=64,
            head_dim=8,
            layers=3,
            **deepseek(12, 3, 20, n_shared_experts=2, n_group=4, topk_group=2),
            first_k_dense_replace=0,
            routed_scaling_factor=2.5,
            attention_bias=True,
            rope_parameters=YARN | {"partial_rotary_factor": 1.0},
        ),
        shape(
            4,
            4,
            layers=4,
            head_dim=16,
            **deepseek(6, 4, 28, n_shared_experts=1, n_group=2, topk_group=2),
            first_k_dense_replace=2,
            routed_scaling_factor=0.8,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters=PARTIAL,
        ),
    ],
    "deepseek_v2": [
        # As V2-Lite.
        shape(
            4,
            4,
            **latent(16, 8, 4, 8, queries=None),
            **deepseek(8, 3, 24, n_shared_experts=2),
            first_k_dense_replace=1,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        # As V2.
        shape(
            8,
            8,
            hidden=64,
            layers=3,
            **latent(24, 8, 8, 12, queries=20),
            **deepseek(12, 3, 20, n_shared_experts=1, n_group=4, topk_group=2),
            topk_method="group_limited_greedy",
            routed_scaling_factor=2.5,
            attention_bias=True,
            rope_parameters=DEFAULT,
        ),
    ],
    "deepseek_v3": [
        shape(
            4,
            4,
            **latent(16, 8, 4, 8, queries=12),
            **deepseek(8, 2, 24, n_shared_experts=1, n_group=2, topk_group=1),
            first_k_dense_replace=1,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            8,
            hidden=64,
            layers=3,
            **latent(20, 12, 8, 16, queries=24),
            **deepseek(12, 3, 20, n_shared_experts=2, n_group=4, topk_group=2),
            first_k_dense_replace=1,
            attention_bias=True,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        # As Kimi-K2: one group.
        shape(
            6,
            6,
            hidden=48,
            **latent(32, 6, 10, 6, queries=None),
            **deepseek(6, 4, 28, n_shared_experts=1, n_group=1, topk_group=1),
            first_k_dense_replace=0,
            routed_scaling_factor=0.8,
            norm_topk_prob=False,
            rope_interleave=False,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
    ],
    "glm4_moe_lite": [
        shape(
            4,
            4,
            **latent(16, 12, 8, 16, queries=12),
            **deepseek(8, 2, 24, n_shared_experts=1),
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            8,
            hidden=64,
            layers=3,
            **latent(24, 8, 4, 10, queries=20),
            **deepseek(8, 3, 20, n_shared_experts=1, n_group=2, topk_group=1),
            mlp_layer_types=["dense", "dense", "sparse"],
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
    ],
    "dots1": [
        shape(
            4,
            2,
            head_dim=16,
            layers=3,
            **deepseek(8, 3, 24, n_shared_experts=1),
            first_k_dense_replace=1,
            norm_topk_prob=True,
            max_window_layers=2,
            sliding_window=14,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            1,
            hidden=64,
            head_dim=8,
            **deepseek(6, 2, 20, n_shared_experts=2),
            routed_scaling_factor=2.5,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=YARN,
        ),
        shape(
            4,
            4,
            head_dim=12,
            **deepseek(8, 4, 20, n_shared_experts=1, n_group=4, topk_group=3),
            norm_topk_prob=True,
            sliding_window=None,
            rope_parameters=DEFAULT,
        ),
    ],
    "ernie4_5_moe": [
        shape(4, 2, **ernie(8, 2, 1, 24), rope_parameters=DEFAULT),
        shape(
            8,
            1,
            hidden=64,
            layers=4,
            **ernie(8, 3, 2, 20, moe_layer_start_index=0, moe_layer_interval=2),
            tie_word_embeddings=False,
            rope_parameters=DEFAULT,
        ),
        shape(
            4,
            4,
            layers=4,
            **ernie(5, 1, 0, 24, moe_layer_start_index=1, moe_layer_end_index=2, moe_norm_min=0.5),
            rope_parameters=LINEAR,
        ),
    ],
    "minimax_m2": [
        shape(
            4,
            2,
            head_dim=20,
            rotary_dim=10,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            head_dim=8,
            num_local_experts=6,
            num_experts_per_tok=4,
            tie_word_embeddings=True,
            rope_parameters=YARN,
        ),
        shape(
            4,
            4,
            head_dim=12,
            rotary_dim=6,
            num_local_experts=5,
            num_experts_per_tok=1,
            rope_parameters=DEFAULT,
        ),
    ],
    "granitemoe": [
        shape(
            4,
            2,
            num_local_experts=8,
            num_experts_per_tok=3,
            **multipliers(6.0, 0.2, 0.4, 0.5),
            rope_parameters=DEFAULT,
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            num_local_experts=5,
            num_experts_per_tok=2,
            attention_bias=True,
            tie_word_embeddings=True,
            **multipliers(2.0, 0.125, 0.3, 1.5),
            rope_parameters=DEFAULT,
        ),
        shape(
            4,
            4,
            num_local_experts=4,
            num_experts_per_tok=4,
            **multipliers(1.0, 0.4, 1.1, 1.0),
            rope_parameters=LINEAR,
        ),
    ],
    "gpt_oss": [
        shape(
            4,
            2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters=_OSS_ROPE,
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=4,
            sliding_window=20,
            swiglu_limit=1.0,
            rope_parameters=_OSS_ROPE,
        ),
        shape(
            4,
            4,
            head_dim=16,
            layers=4,
            num_local_experts=3,
            num_experts_per_tok=1,
            layer_types=[FULL, SLIDING, SLIDING, FULL],
            sliding_window=33,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT,
        ),
    ],
    # As 26B-A4B: two layers without a window share an array of the pool.
    "gemma4_moe": [
        shape(
            8,
            4,
            **gemma4(
                layers=6,
                head_dims=(8, 16),
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                enable_moe_block=True,
                num_experts=8,
                top_k_experts=2,
                moe_intermediate_size=24,
                final_logit_softcapping=20.0,
            ),
        ),
        shape(
            4,
            2,
            **gemma4(
                layers=3,
                head_dims=(8, 8),
                num_kv_shared_layers=1,
                layer_types=[FULL, SLIDING, FULL],
                enable_moe_block=True,
                num_experts=5,
                top_k_experts=5,
                moe_intermediate_size=16,
                hidden_size_per_layer_input=8,
                tie_word_embeddings=False,
            ),
        ),
    ],
    "qwen3_5_moe": [
        shape(
            4,
            2,
            **qwen3_5(4, head_dim=16, heads=(2, 4), dims=(24, 16)),
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=32,
        ),
        shape(
            4,
            4,
            **qwen3_5(
                3,
                head_dim=32,
                heads=(2, 2),
                dims=(16, 16),
                layer_types=[FULL, RECURRENT, FULL],
            ),
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            tie_word_embeddings=True,
        ),
    ],
    "qwen3_next": [
        shape(
            4,
            2,
            # With a smaller epsilon, torch's float32 logits can be 1e-4 from its float64 logits.
            **qwen3_5(
                4,
                head_dim=16,
                heads=(2, 4),
                dims=(24, 16),
                rope_parameters=PARTIAL,
                rms_norm_eps=0.1,
            ),
            **qwen(6, 2, moe_intermediate_size=24, shared_expert_intermediate_size=32),
        ),
        # Layers 1 and 5 have experts, and MLPs are as wide as no expert.
        shape(
            8,
            2,
            hidden=64,
            **qwen3_5(
                6,
                head_dim=32,
                heads=(4, 12),
                dims=(16, 8),
                layer_types=[FULL, RECURRENT, RECURRENT, FULL, RECURRENT, RECURRENT],
                linear_conv_kernel_dim=3,
                rope_parameters=YARN | {"partial_rotary_factor": 0.5},
            ),
            **qwen(5, 3, moe_intermediate_size=16, shared_expert_intermediate_size=24),
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ],
}
VARIANTS["granite_hybrid_moe"] = [
    shape(
        4,
        2,
        hidden=48,
        **multipliers(3.0, 0.2, 0.3, 1.0),
        **granite_hybrid([RECURRENT, FULL, RECURRENT], heads=(2, 3), dims=(24, 16))
        | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    shape(
        4,
        4,
        hidden=64,
        **multipliers(2.0, 0.125, 0.22, 1.5),
        **granite_hybrid(
            [FULL, RECURRENT],
            heads=(1, 4),
            dims=(16, 32),
            num_experts_per_tok=4,
            mamba_proj_bias=True,
            tie_word_embeddings=True,
            position_embedding_type="rope",
        )
        | {"num_local_experts": 4},
    ),
]
VARIANTS["nemotron_h_moe"] = [
    shape(
        4,
        2,
        hidden=48,
        head_dim=16,
        **deepseek(8, 3, 24, moe_shared_expert_intermediate_size=40, n_group=4, topk_group=2),
        **nemotron_h("ME*E", heads=(2, 3), dims=(24, 16)),
        routed_scaling_factor=2.5,
    ),
    shape(
        8,
        1,
        hidden=64,
        head_dim=8,
        **deepseek(6, 2, 16, moe_shared_expert_intermediate_size=24, moe_latent_size=32),
        **nemotron_h("M-*ME", heads=(1, 8), dims=(16, 16), mlp_bias=True),
        norm_topk_prob=False,
    ),
]
VARIANTS["lfm2_moe"] = [
    shape(
        4,
        2,
        **lfm2([CONVOLUTION, FULL, CONVOLUTION], num_dense_layers=1),
        **qwen(8, 3, moe_intermediate_size=24),
        routed_scaling_factor=1.5,
    ),
    shape(
        8,
        1,
        hidden=64,
        **lfm2(
            [CONVOLUTION, FULL, CONVOLUTION],
            YARN,
            num_dense_layers=0,
            conv_bias=True,
            use_expert_bias=False,
            norm_topk_prob=False,
            tie_word_embeddings=False,
        ),
        **qwen(6, 2, moe_intermediate_size=16),
    ),
]
CLASSES = {
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "dots1": "Dots1Config",
    "ernie4_5_moe": "Ernie4_5_MoeConfig",
    "minimax_m2": "MiniMaxM2Config",
    "granitemoe": "GraniteMoeConfig",
    "gpt_oss": "GptOssConfig",
    "gemma4_moe": "Gemma4TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
    "granite_hybrid_moe": "GraniteMoeHybridConfig",
    "nemotron_h_moe": "NemotronHConfig",
    "lfm2_moe": "Lfm2MoeConfig",
}
CASES = [(family, i) for family, variants in VARIANTS.items() for i in range(len(variants))]


def build(family: str, variant: int, path: str | Path, **overrides: Any) -> Path:
    """As `checkpoints.build`."""
    arguments = VARIANTS[family][variant] | overrides
    return checkpoints.build_from(CLASSES[family], arguments, path, seed=f"{family} {variant}")
