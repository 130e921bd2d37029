"""Tiny checkpoints of the families that were made from the shared decoder's parts.

Their variants stand apart from `checkpoints.VARIANTS`, over which most tests of families run: with twelve more these
would take too long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import checkpoints
from tests.checkpoints import shape

SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
CONVOLUTION = "conv"
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = DEFAULT | {"rope_type": "linear", "factor": 2.5}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PARTIAL = DEFAULT | {"partial_rotary_factor": 0.5}


def multipliers(embedding: float, attention: float, residual: float, logits: float) -> dict:
    """Granite's."""
    return {
        "embedding_multiplier": embedding,
        "attention_multiplier": attention,
        "residual_multiplier": residual,
        "logits_scaling": logits,
    }


def gemma4(*, layers: int, head_dims: tuple[int, int], **other: Any) -> dict:
    """Gemma 4's. head_dims: of layers with a window, and without."""
    plain, full = head_dims
    return {
        "num_hidden_layers": layers,
        "layer_types": [FULL if index % 3 == 2 else SLIDING for index in range(layers)],
        "sliding_window": 12,
        "head_dim": plain,
        "global_head_dim": full,
        "vocab_size_per_layer_input": checkpoints.VOCAB_SIZE,
        "hidden_size_per_layer_input": 0,
        **other,
    }


def qwen3_5(
    layers: int, *, head_dim: int, heads: tuple[int, int], dims: tuple[int, int], **other: Any
) -> dict:
    """Qwen3.5's. heads: of keys and of values, in layers with a recurrent state; dims: of these."""
    quarter = head_dim // 8  # the frequencies of a quarter of the head
    sections = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3]
    return {
        "num_hidden_layers": layers,
        "layer_types": [FULL if index % 4 == 3 else RECURRENT for index in range(layers)],
        "head_dim": head_dim,
        "linear_num_key_heads": heads[0],
        "linear_num_value_heads": heads[1],
        "linear_key_head_dim": dims[0],
        "linear_value_head_dim": dims[1],
        # The norm of a layer's small outputs would multiply rounding errors.
        "rms_norm_eps": 1e-2,
        "rope_parameters": DEFAULT
        | {"partial_rotary_factor": 0.25, "mrope_section": sections, "mrope_interleaved": True},
        **other,
    }


def granite_hybrid(
    kinds: list[str], *, heads: tuple[int, int], dims: tuple[int, int], **other: Any
) -> dict:
    """Granite 4's. heads: groups and heads in each; dims: of the state and a head."""
    num_heads = heads[0] * heads[1]
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "mamba_n_groups": heads[0],
        "mamba_n_heads": num_heads,
        "mamba_d_state": dims[0],
        "mamba_d_head": dims[1],
        "mamba_expand": 2,
        "rope_parameters": DEFAULT,
        **other,
    }


def nemotron_h(
    kinds: str, *, heads: tuple[int, int], dims: tuple[int, int], **other: Any
) -> dict[str, Any]:
    """Nemotron-H's. kinds: M for Mamba-2, * for attention, - for an MLP, E for experts. Others as Granite 4's."""
    return {
        "hybrid_override_pattern": kinds,
        "n_groups": heads[0],
        "mamba_num_heads": heads[0] * heads[1],
        "ssm_state_size": dims[0],
        "mamba_head_dim": dims[1],
        # In transformers the least time step of a prompt, here and in vLLM only of initial weights. So small,
        # it is no limit there.
        "time_step_min": 1e-9,
        **other,
    }


def lfm2(kinds: list[str], rope: dict[str, Any] = DEFAULT, **other: Any) -> dict[str, Any]:
    """LFM2's. kinds: of layers."""
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "rope_parameters": rope,
        **other,
    }


def falcon_h1(*, heads: tuple[int, int], dims: tuple[int, int], **other: Any) -> dict[str, Any]:
    """Falcon-H1's. heads and dims as Granite 4's."""
    num_heads = heads[0] * heads[1]
    return {
        "mamba_n_groups": heads[0],
        "mamba_n_heads": num_heads,
        "mamba_d_ssm": num_heads * dims[1],
        "mamba_d_head": dims[1],
        "mamba_d_state": dims[0],
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.5,
        "mlp_multipliers": [0.9, 0.4],
        "ssm_multipliers": [0.7, 0.5, 0.6, 0.8, 0.9],
        "rope_parameters": DEFAULT,
        **other,
    }


def growing(rope: dict[str, Any], growth: float, length: int, **more: Any) -> dict[str, Any]:
    """`rope` of a Ministral 3 of 512 tokens, whose queries grow after each `length` of them."""
    own = {"llama_4_scaling_beta": growth, "original_max_position_embeddings": length}
    return rope | own | {"factor": 512 / length} | more


GLM_TIED = shape(
    8,
    1,
    hidden=64,
    layers=3,
    head_dim=8,
    attention_bias=False,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT | {"partial_rotary_factor": 1.0},
)

# They differ in heads, head dim, tying, RoPE and, where the family has them, biases, windows, multipliers.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "ministral": [
        shape(
            4,
            2,
            layers=3,
            head_dim=16,
            layer_types=[SLIDING, FULL, SLIDING],
            sliding_window=9,
            rope_parameters=DEFAULT,
        ),
        shape(
            4,
            4,
            head_dim=12,
            layer_types=[FULL, FULL],
            tie_word_embeddings=True,
            rope_parameters=LINEAR,
        ),
        shape(8, 1, hidden=64, head_dim=8, sliding_window=30, rope_parameters=YARN),
    ],
    "ministral3": [
        shape(4, 2, head_dim=16, rope_parameters=growing(YARN, 0.3, 32)),
        shape(
            4,
            4,
            head_dim=12,
            sliding_window=40,
            tie_word_embeddings=True,
            rope_parameters=growing(DEFAULT, 0.5, 10),
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            head_dim=8,
            rope_parameters=growing(YARN, 0.1, 64, mscale=1.0, mscale_all_dim=1.0),
        ),
    ],
    "gemma": [
        shape(4, 1, head_dim=16, rope_parameters=DEFAULT),
        shape(
            4,
            4,
            head_dim=12,
            layers=3,
            hidden_act="gelu",
            attention_bias=True,
            tie_word_embeddings=False,
            rope_parameters=LINEAR,
        ),
        shape(8, 2, hidden=64, head_dim=8, hidden_act="silu", rope_parameters=YARN),
    ],
    "granite": [
        shape(4, 2, **multipliers(6.0, 0.2, 0.4, 0.5), rope_parameters=DEFAULT),
        shape(
            4,
            4,
            **multipliers(2.0, 0.125, 0.22, 1.5),
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=LINEAR,
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            **multipliers(1.0, 1.0, 1.5, 1.0),
            mlp_bias=True,
            rope_parameters=YARN,
        ),
    ],
    "smollm3": [
        shape(4, 2, layers=4, tie_word_embeddings=True, rope_parameters=DEFAULT),
        shape(
            8,
            4,
            hidden=64,
            layers=3,
            no_rope_layers=[0, 1, 0],
            tie_word_embeddings=False,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=YARN,
        ),
        shape(
            4,
            1,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=10,
            rope_parameters=LINEAR,
        ),
    ],
    "olmo2": [
        shape(4, 4, rope_parameters=DEFAULT),
        shape(
            6, 3, hidden=48, tie_word_embeddings=True, attention_bias=True, rope_parameters=LINEAR
        ),
        shape(8, 1, hidden=64, layers=3, rope_parameters=YARN),
    ],
    "olmo3": [
        shape(
            4,
            4,
            layers=4,
            sliding_window=12,
            rope_parameters={FULL: YARN, SLIDING: DEFAULT},
        ),
        shape(
            8,
            2,
            hidden=64,
            layer_types=[FULL, SLIDING],
            sliding_window=30,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters={FULL: DEFAULT, SLIDING: DEFAULT},
        ),
        shape(
            4,
            1,
            layers=3,
            layer_types=[SLIDING, SLIDING, SLIDING],
            sliding_window=7,
            rope_parameters={FULL: DEFAULT, SLIDING: LINEAR},
        ),
    ],
    "cohere": [
        shape(4, 2, logit_scale=0.8, rope_parameters=DEFAULT),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            tie_word_embeddings=False,
            attention_bias=True,
            logit_scale=1.5,
            rope_parameters=LINEAR,
        ),
        shape(4, 4, layer_norm_eps=1e-3, logit_scale=0.7, hidden_act="gelu", rope_parameters=YARN),
    ],
    "cohere2": [
        shape(4, 2, layers=4, sliding_window=12, logit_scale=0.8, rope_parameters=DEFAULT),
        shape(
            8,
            1,
            hidden=64,
            layer_types=[FULL, SLIDING],
            sliding_window=33,
            tie_word_embeddings=False,
            attention_bias=True,
            logit_scale=1.0,
            rope_parameters=LINEAR,
        ),
        shape(
            4,
            4,
            layers=3,
            layer_types=[FULL, FULL, FULL],
            sliding_window=8,
            layer_norm_eps=1e-3,
            logit_scale=0.7,
            hidden_act="gelu",
            rope_parameters=DEFAULT,
        ),
    ],
    "glm4": [
        shape(4, 2, head_dim=16, rope_parameters=PARTIAL),
        GLM_TIED,
        shape(4, 4, head_dim=24, rope_parameters=LINEAR | {"partial_rotary_factor": 0.25}),
    ],
    "glm": [
        shape(4, 2, head_dim=16, rope_parameters=PARTIAL),
        GLM_TIED,
        shape(4, 4, head_dim=24, rope_parameters=YARN | {"partial_rotary_factor": 0.75}),
    ],
    "starcoder2": [
        shape(4, 2, rope_parameters=DEFAULT),
        shape(
            4,
            4,
            sliding_window=9,
            tie_word_embeddings=False,
            use_bias=False,
            norm_epsilon=1e-3,
            rope_parameters=LINEAR,
        ),
        shape(8, 1, hidden=64, layers=3, hidden_act="gelu", rope_parameters=YARN),
    ],
    "nemotron": [
        shape(4, 2, rope_parameters=PARTIAL),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            head_dim=8,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            norm_eps=1e-3,
            rope_parameters=LINEAR | {"partial_rotary_factor": 1.0},
        ),
        shape(4, 4, head_dim=16, hidden_act="gelu", rope_parameters=PARTIAL),
    ],
    "exaone4": [
        shape(4, 2, layers=4, sliding_window=12, rope_parameters=DEFAULT),
        shape(
            4,
            4,
            head_dim=16,
            sliding_window=None,
            layer_types=[FULL, FULL],
            tie_word_embeddings=True,
            rope_parameters=YARN,
        ),
        shape(
            8,
            1,
            hidden=64,
            layers=3,
            layer_types=[FULL, SLIDING, FULL],
            sliding_window=33,
            rope_parameters=LINEAR,
        ),
    ],
    "seed_oss": [
        shape(4, 2, head_dim=16, rope_parameters=DEFAULT),
        shape(
            8,
            1,
            hidden=64,
            head_dim=8,
            layers=3,
            attention_bias=False,
            attention_out_bias=True,
            tie_word_embeddings=True,
            rope_parameters=LINEAR,
        ),
        shape(4, 4, head_dim=12, mlp_bias=True, rope_parameters=YARN),
    ],
    "ernie4_5": [
        shape(4, 2, head_dim=16, rope_parameters=DEFAULT),
        shape(
            8,
            1,
            hidden=64,
            head_dim=8,
            layers=3,
            use_bias=True,
            tie_word_embeddings=False,
            rope_parameters=LINEAR,
        ),
        shape(4, 4, head_dim=12, hidden_act="gelu", rope_parameters=YARN),
    ],
    # As E2B, 31B, and a model whose heads are alike in all layers.
    "gemma4": [
        shape(
            4,
            1,
            **gemma4(
                layers=6,
                head_dims=(8, 16),
                num_kv_shared_layers=3,
                use_double_wide_mlp=True,
                hidden_size_per_layer_input=12,
                final_logit_softcapping=20.0,
            ),
        ),
        shape(
            8,
            4,
            hidden=64,
            **gemma4(
                layers=6,
                head_dims=(16, 32),
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                tie_word_embeddings=False,
                attention_bias=True,
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
                hidden_size_per_layer_input=8,
                rope_parameters={SLIDING: LINEAR, FULL: DEFAULT},
            ),
        ),
    ],
}
# They have as many KV heads as heads, whatever else config.json says.
VARIANTS["gpt_neox"] = [
    shape(4, 2, hidden=64, layers=3, rope_parameters=PARTIAL | {"partial_rotary_factor": 0.25}),
    shape(
        4,
        4,
        hidden=48,
        hidden_act="gelu_fast",
        use_parallel_residual=False,
        layer_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters=LINEAR | {"partial_rotary_factor": 1.0},
    ),
    shape(
        8,
        8,
        hidden=64,
        attention_bias=False,
        hidden_act="gelu_new",
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    ),
]
VARIANTS["gpt2"] = [
    shape(4, 2, hidden=64, layers=3),
    shape(
        8,
        8,
        hidden=48,
        n_inner=72,
        activation_function="relu",
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    shape(4, 4, scale_attn_weights=False, activation_function="gelu"),
]
VARIANTS["phi"] = [
    shape(4, 2, hidden=64, layers=3, rope_parameters=PARTIAL),
    shape(
        8,
        8,
        hidden=64,
        qk_layernorm=True,
        hidden_act="gelu",
        rope_parameters=LINEAR | {"partial_rotary_factor": 1.0},
    ),
    shape(4, 1, layer_norm_eps=1e-3, rope_parameters=YARN | {"partial_rotary_factor": 0.5}),
]
VARIANTS["qwen3_5"] = [
    shape(4, 2, **qwen3_5(4, head_dim=16, heads=(2, 6), dims=(24, 8))),
    shape(
        8,
        1,
        hidden=64,
        **qwen3_5(
            5,
            head_dim=32,
            heads=(4, 4),
            dims=(16, 16),
            layer_types=[FULL, RECURRENT, RECURRENT, FULL, RECURRENT],
            linear_conv_kernel_dim=3,
            tie_word_embeddings=True,
            attention_bias=True,
        ),
    ),
]
VARIANTS["granite_hybrid"] = [
    shape(
        4,
        2,
        hidden=48,
        **multipliers(3.0, 0.2, 0.3, 1.0),
        **granite_hybrid([RECURRENT, FULL, RECURRENT], heads=(2, 3), dims=(24, 16)),
    ),
    shape(
        8,
        1,
        hidden=64,
        **multipliers(2.0, 0.125, 0.22, 1.5),
        **granite_hybrid(
            [FULL, RECURRENT, RECURRENT, FULL],
            heads=(1, 8),
            dims=(16, 16),
            mamba_d_conv=3,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            tie_word_embeddings=True,
            position_embedding_type="rope",
            time_step_limit=[0.2, 1.0],
        ),
    ),
    shape(
        4,
        4,
        **multipliers(1.0, 0.3, 1.2, 1.0),
        **granite_hybrid([FULL] * 3, heads=(1, 2), dims=(8, 32), position_embedding_type="rope"),
    ),
]
VARIANTS["nemotron_h"] = [
    shape(4, 2, hidden=96, head_dim=16, **nemotron_h("M-*-M", heads=(2, 3), dims=(24, 16))),
    shape(
        8,
        1,
        hidden=64,
        head_dim=8,
        **nemotron_h(
            "*MM-",
            heads=(1, 8),
            dims=(16, 16),
            conv_kernel=3,
            use_bias=True,
            use_conv_bias=False,
            mlp_bias=True,
            # Theirs and ours.
            time_step_min=0.2,
            time_step_limit=[0.2, float("inf")],
        ),
    ),
    shape(
        4,
        4,
        head_dim=12,
        **nemotron_h("-M*", heads=(4, 1), dims=(8, 32), mlp_hidden_act="gelu_pytorch_tanh"),
    ),
]
VARIANTS["lfm2"] = [
    shape(
        4,
        2,
        **lfm2(
            [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION],
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.2,
        ),
    ),
    shape(
        8,
        1,
        hidden=64,
        **lfm2(
            [FULL, CONVOLUTION, FULL],
            YARN,
            conv_L_cache=4,
            conv_bias=True,
            norm_eps=1e-3,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        ),
    ),
    shape(4, 4, **lfm2([FULL, FULL], block_multiple_of=8)),
]
VARIANTS["falcon_h1"] = [
    shape(4, 2, hidden=48, **falcon_h1(heads=(2, 3), dims=(24, 16))),
    shape(
        8,
        1,
        hidden=64,
        **falcon_h1(
            heads=(1, 8),
            dims=(16, 16),
            head_dim=16,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_d_conv=3,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            time_step_limit=[0.2, 1.0],
            rope_parameters=YARN,
        ),
    ),
    shape(
        4,
        4,
        layers=1,
        **falcon_h1(heads=(2, 2), dims=(8, 32), mamba_rms_norm=True, projectors_bias=True),
    ),
]
CLASSES = {
    "ministral": "MinistralConfig",
    "ministral3": "Ministral3Config",
    "gemma": "GemmaConfig",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "cohere": "CohereConfig",
    "cohere2": "Cohere2Config",
    "glm4": "Glm4Config",
    "glm": "GlmConfig",
    "starcoder2": "Starcoder2Config",
    "nemotron": "NemotronConfig",
    "exaone4": "Exaone4Config",
    "seed_oss": "SeedOssConfig",
    "ernie4_5": "Ernie4_5Config",
    "gemma4": "Gemma4TextConfig",
    "gpt_neox": "GPTNeoXConfig",
    "gpt2": "GPT2Config",
    "phi": "PhiConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "granite_hybrid": "GraniteMoeHybridConfig",
    "nemotron_h": "NemotronHConfig",
    "lfm2": "Lfm2Config",
    "falcon_h1": "FalconH1Config",
}
CASES = [(family, i) for family, variants in VARIANTS.items() for i in range(len(variants))]


def build(family: str, variant: int, path: str | Path, **overrides: Any) -> Path:
    """As `checkpoints.build`."""
    arguments = VARIANTS[family][variant] | overrides
    return checkpoints.build_from(CLASSES[family], arguments, path, seed=f"{family} {variant}")
