"""Tiny checkpoints of models that take pictures, made by transformers and torch, and torch's own answers to them.

Random and seeded; weights, norms and biases are spread wide enough that a mistake anywhere shows.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from jaxpage.pictures.border import Expanded, Picture
from jaxpage.tiny import train_byte_level_bpe, write_tokenizer
from tests import dense_families

VOCAB_SIZE = 300
IMAGE, VIDEO, START, END = 290, 291, 288, 289  # tokens of Qwen2.5-VL and Qwen3-VL here


def qwen_text() -> dict[str, Any]:
    """The decoder of Qwen2.5-VL here; that of Qwen3-VL has it too, with changes."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 2, 2],
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def qwen2_5_vl_config(**vision: Any) -> transformers.PretrainedConfig:
    """Three layers in the tower, of which the second attends within frames; `vision` on top."""
    tower = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 2,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=qwen_text(),
        vision_config=tower | vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )


_DEEP = {"deepstack_visual_indexes": [0, 2]}


def qwen3_vl_config(**vision: Any) -> transformers.PretrainedConfig:
    """Four layers in the tower, of which two reach the decoder; a table of 6 x 6 places. `vision` on top."""
    return _qwen3_vl(transformers.Qwen3VLConfig, _DEEP | vision)


def qwen3_vl_moe_config(**vision: Any) -> transformers.PretrainedConfig:
    """The same with 6 experts in the first and the last layer of the decoder."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    return _qwen3_vl(transformers.Qwen3VLMoeConfig, _DEEP | vision, **experts, mlp_only_layers=[1])


def _qwen3_vl(make: Any, vision: dict[str, Any], **more: Any) -> transformers.PretrainedConfig:
    """`more`: of the decoder."""
    tower = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 36,
        "patch_size": 16,
    }
    text = qwen_text() | {"num_hidden_layers": 3, "head_dim": 12} | more
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}
    return make(
        text_config=text,
        vision_config=tower | vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


_RECURRENT = dense_families.qwen3_5(4, head_dim=24, heads=(2, 4), dims=(16, 12))


def qwen3_5_config(**vision: Any) -> transformers.PretrainedConfig:
    """A decoder of three layers with a recurrent state and one with attention, behind the tower of Qwen3-VL."""
    return _qwen3_vl(transformers.Qwen3_5Config, vision, **_RECURRENT)


def qwen3_5_moe_config(**vision: Any) -> transformers.PretrainedConfig:
    """The same with 6 experts and a shared one in each layer of the decoder."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    experts["shared_expert_intermediate_size"] = 24
    return _qwen3_vl(transformers.Qwen3_5MoeConfig, vision, **_RECURRENT, **experts)


GEMMA_IMAGE, GEMMA_BEGIN, GEMMA_END = 293, 294, 295


def gemma3_config(**vision: Any) -> transformers.PretrainedConfig:
    """A picture of 8 x 8 patches becomes 16 embeddings; a window is shorter than a picture. `vision` on top."""
    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 56,
        "patch_size": 7,
        "vision_use_head": False,
    }
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=tower | vision,
        mm_tokens_per_image=16,
        image_token_index=GEMMA_IMAGE,
        boi_token_index=GEMMA_BEGIN,
        eoi_token_index=GEMMA_END,
    )


GEMMA_4_SIDE = 12  # pixels of a square of patches that becomes one embedding


def gemma4_config(
    *, sees_ahead: bool = False, vision: dict[str, Any] | None = None, **text: Any
) -> transformers.PretrainedConfig:
    """As E2B, or with tokens of a picture that see each other in layers with a window, as 31B. Squares of 3 x 3 patches
    become embeddings.
    """
    tower = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 128,
        "use_clipped_linears": not sees_ahead,
        "standardize": sees_ahead,
    }
    decoder = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0 if sees_ahead else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 9,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0 if sees_ahead else 8,
        "use_bidirectional_attention": "vision" if sees_ahead else None,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.Gemma4Config(
        text_config=decoder | text,
        vision_config=tower | (vision or {}),
        audio_config=None,
        image_token_id=GEMMA_IMAGE,
        boi_token_id=GEMMA_BEGIN,
        eoi_token_id=GEMMA_END,
    )


MISTRAL_IMAGE, MISTRAL_BREAK, MISTRAL_END = 296, 297, 298
MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
MISTRAL_SIDE = 12  # pixels of a square of patches that becomes one embedding


def mistral3_config(
    *, text: dict[str, Any] | None = None, **vision: Any
) -> transformers.PretrainedConfig:
    """The decoder of Ministral 3, whose queries are scaled by their position, or with `text` on top; `vision` too."""
    tower = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 240,
        "patch_size": 6,
        "hidden_act": "silu",
    }
    decoder = {
        "model_type": "ministral3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        # The projector's too.
        "rms_norm_eps": 1e-3,
        "rope_parameters": dense_families.growing(dense_families.YARN, 0.2, 32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.Mistral3Config(
        text_config=decoder | (text or {}),
        vision_config=tower | vision,
        image_token_index=MISTRAL_IMAGE,
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
    )


def save(config: transformers.PretrainedConfig, path: str | Path, *, seed: str) -> Path:
    """Write a random model of a config for pictures and text."""
    import torch

    torch.manual_seed(zlib.crc32(seed.encode()))
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name or "ln_q" in name or "ln_pre" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed_tokens" in name or "position_embedding" in name or "pos_embed" in name:
                parameter.normal_(0, 0.3)
            elif ".experts." in name:  # all experts of a layer
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            else:
                size = parameter[0].numel() if parameter.ndim > 1 else parameter.numel()
                parameter.normal_(0, size**-0.5)
        for name, buffer in model.named_buffers():
            # Gemma 4's, in the tower near enough to zero to show.
            if name.endswith(("input_min", "output_min")):
                buffer.fill_(-1.5)
            elif name.endswith(("input_max", "output_max")):
                buffer.fill_(1.0)
            elif name.endswith(("layer_scalar", "std_scale", "std_bias")):
                buffer.uniform_(0.6, 1.2)
    model.save_pretrained(path)
    return Path(path)


def save_tokenizer(folder: str | Path) -> None:
    """A byte-level one, whose tokens are none of those that stand for pictures, but for those of Mistral 3."""
    tokenizer = train_byte_level_bpe(["0 seconds"], vocab_size=270, min_frequency=1)
    unused = [f"<unused {i}>" for i in range(tokenizer.get_vocab_size(), MISTRAL_IMAGE)]
    tokenizer.add_special_tokens([*unused, *MISTRAL_TOKENS])
    write_tokenizer(Path(folder), tokenizer)


def torch_model(path: str | Path) -> Any:
    """transformers' model, float32, with eager attention."""
    import torch

    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8[height, width, 3]: waves of some wavelengths, and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / rng.uniform(3, 30) + y / rng.uniform(3, 30)) for _ in range(3)]
    noise = rng.normal(0, 0.2, (height, width, 3))
    return np.clip(128 + 90 * (np.stack(waves, axis=-1) + noise), 0, 255).astype(np.uint8)


def qwen_inputs(prompt: Expanded, pictures: list[Picture]) -> dict[str, Any]:
    """What transformers' Qwen2.5-VL, Qwen3-VL and Qwen3.5 take, which place the tokens themselves."""
    import torch

    token_ids = torch.tensor([prompt.token_ids])
    kinds = (token_ids == IMAGE).int() + 2 * (token_ids == VIDEO).int()
    given: dict[str, Any] = {}
    for kind, values, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        own = [picture for picture in pictures if picture.kind == kind]  # videos whole
        if own:
            given[values] = torch.tensor(np.concatenate([p.patches for p in own]))
            given[grids] = torch.tensor([p.grid for p in own])
        if own and own[0].second_per_grid is not None:
            given["second_per_grid_ts"] = torch.tensor([p.second_per_grid for p in own])
    return {"input_ids": token_ids, "mm_token_type_ids": kinds, **given}


def qwen_logits(model: Any, prompt: Expanded, pictures: list[Picture]) -> np.ndarray:
    """float32[T, V] of transformers' Qwen2.5-VL, Qwen3-VL or Qwen3.5."""
    import torch

    with torch.no_grad():
        return model(**qwen_inputs(prompt, pictures)).logits[0].numpy()


def gemma_pixels(picture: Picture) -> np.ndarray:
    """float32[3, 56, 56] of the patches of `gemma3_config`."""
    blocks = picture.patches.reshape(4, 4, 2, 2, 3, 7, 7).transpose(4, 0, 2, 5, 1, 3, 6)
    return blocks.reshape(3, 56, 56)


def gemma_logits(model: Any, token_ids: list[int], pictures: list[Picture]) -> np.ndarray:
    """float32[T, V] of transformers' Gemma 3."""
    import torch

    given: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    if pictures:
        given["token_type_ids"] = (given["input_ids"] == GEMMA_IMAGE).int()
        given["pixel_values"] = torch.tensor(np.stack([gemma_pixels(each) for each in pictures]))
    with torch.no_grad():
        return model(**given).logits[0].numpy()


def gemma4_values(config: Any, pictures: list[Picture]) -> dict[str, Any]:
    """What transformers' Gemma 4 takes for pictures, padded to the largest; in our order of patches."""
    import torch

    most = max(len(picture.patches) for picture in pictures)
    values, places = [], []
    for picture in pictures:
        missing = most - len(picture.patches)
        given = picture.patches / 2 + 0.5
        values.append(np.pad(given, ((0, missing), (0, 0))))
        own = config.places(picture.grid).T
        places.append(np.pad(own, ((0, missing), (0, 0)), constant_values=-1))
    return {
        "pixel_values": torch.tensor(np.stack(values)),
        "image_position_ids": torch.tensor(np.stack(places), dtype=torch.long),
    }


def gemma4_logits(
    model: Any, config: Any, token_ids: list[int], pictures: list[Picture]
) -> np.ndarray:
    """float32[T, V] of transformers' Gemma 4. config: of our tower."""
    import torch

    given: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    given["mm_token_type_ids"] = (given["input_ids"] == GEMMA_IMAGE).int()
    if pictures:
        given |= gemma4_values(config, pictures)
    with torch.no_grad():
        return model(**given).logits[0].numpy()


def mistral3_values(config: Any, pictures: list[Picture]) -> dict[str, Any]:
    """What transformers' Mistral 3 takes for pictures, padded to the largest. config: of our tower."""
    import torch

    size, merge = config.patch_size, config.merge_size
    arrays = []
    for picture in pictures:
        _, height, width = picture.grid
        blocks = (height // merge, width // merge, merge, merge, 3, size, size)
        values = picture.patches.reshape(blocks).transpose(4, 0, 2, 5, 1, 3, 6)
        arrays.append(values.reshape(3, height * size, width * size))
    sizes = np.array([array.shape[1:] for array in arrays])
    padded = []
    for array, own in zip(arrays, sizes, strict=True):
        missing = sizes.max(axis=0) - own
        padded.append(np.pad(array, ((0, 0), (0, missing[0]), (0, missing[1]))))
    return {"pixel_values": torch.tensor(np.stack(padded)), "image_sizes": torch.tensor(sizes)}


def mistral3_logits(
    model: Any, config: Any, token_ids: list[int], pictures: list[Picture]
) -> np.ndarray:
    """float32[T, V] of transformers' Mistral 3. config: of our tower."""
    import torch

    given: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
    if pictures:
        given |= mistral3_values(config, pictures)
    with torch.no_grad():
        return model(**given).logits[0].numpy()
