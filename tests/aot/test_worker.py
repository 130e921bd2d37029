"""What is made of the compiler's numbers before they are an estimate."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from jaxpage.aot.attention_kinds import attention_kinds
from jaxpage.aot.exchange import Collective
from jaxpage.aot.experts import (
    exchange_of_experts,
    num_active,
    numbers_of,
    temp_bytes_of_experts,
)
from jaxpage.aot.model_numbers import numbers_of_drafts, numbers_of_model, temp_bytes_at_most
from jaxpage.aot.pictures import numbers_of_encoder
from jaxpage.aot.recurrence import temp_bytes_of_recurrence
from jaxpage.aot.steps import exchange_of
from jaxpage.aot.worker import largest_step_bytes, smaller_steps
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.ops.experts import ExpertsKernel
from jaxpage.ops.implementations import Choice
from jaxpage.parallel.mesh import local_mesh
from jaxpage.speculation import SpeculativeConfig
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import choose_experts
from pallas_kernels.paged_attention.tpu_shape import TileSizes
from tests.aot.gemma4 import MODELS as GEMMA_4
from tests.aot.heads import HEAD
from tests.aot.models import DEEPSEEK_V2_LITE, EXPERTS, MODELS, QWEN2_5_VL_3B
from tests.aot.quantised import METHODS
from tests.aot.recurrent import MODELS as RECURRENT


def program(temp_bytes: int, result_bytes: int) -> dict[str, int]:
    return {"temp_bytes": temp_bytes, "result_bytes": result_bytes}


def test_a_decode_step_needs_its_layers_and_its_sampler():
    # layers, forward, sample. 100 + 1000, and two results of 8 steps each.
    found = largest_step_bytes([program(100, 7), program(300, 20), program(1000, 5)], 8)
    assert found == 1100 + 2 * 8 * 5


def test_a_step_with_prompts_needs_the_larger_of_its_programs():
    found = largest_step_bytes([program(100, 7), program(3000, 20), program(1000, 5)], 1)
    assert found == 3000 + 2 * (20 + 5)


def test_an_encoder_of_pictures_may_need_the_most():
    programs = [program(100, 7), program(3000, 20), program(1000, 5), program(9000, 1)]
    assert largest_step_bytes(programs, 1) == 9000 + 2 * (20 + 5 + 1)


def test_nothing_compiled_needs_nothing():
    assert largest_step_bytes([], 8) == 0


def spec_of(config, tmp_path, num_devices=1):
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineConfig.from_options(model=str(tmp_path))
    mesh = local_mesh(num_devices) if num_devices > 1 else None
    return make_engine_spec(options, device=jax.local_devices()[0], mesh=mesh)


SHORT_MIXTURE = EXPERTS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2}


def spec_with_drafts(tmp_path, num_devices=1, **options):
    """Of two layers of Qwen3-30B-A3B, and with drafts of Qwen2.5-0.5B."""
    for name, config in (("model", SHORT_MIXTURE), ("drafts", MODELS["Qwen2.5-0.5B"])):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    speculative = {"model": str(tmp_path / "drafts.json"), "num_speculative_tokens": 4}
    options = {"model": str(tmp_path / "model.json"), "speculative_config": speculative} | options
    mesh = local_mesh(num_devices) if num_devices > 1 else None
    config = EngineConfig.from_options(**options)
    return make_engine_spec(config, device=jax.local_devices()[0], mesh=mesh)


def test_each_device_has_rows_for_the_experts_of_all_tokens(tmp_path):
    """8 of 128 experts of 768 for each of 2,048 tokens of 2,048 numbers in bfloat16, on a CPU in plain XLA: inputs,
    products with gate and up, twice, and activations. A kernel has the products once: then those with down are more,
    with their activations, and again in the order of tokens.
    """
    alone, four = (spec_of(SHORT_MIXTURE, tmp_path, n) for n in (1, 4))
    in_xla = 2048 * 8 * (2 * 2048 + 2 * 4 * 2 * 768 + 2 * 768)
    assert temp_bytes_of_experts(alone) == temp_bytes_of_experts(four) == in_xla
    choose_experts(alone.model, lambda *_: Choice("tpu", ExpertsKernel("tpu")))
    assert temp_bytes_of_experts(alone) == 2048 * 8 * (2 * 768 + 2 * 4 * 2048)


def test_smaller_steps_need_less(tmp_path):
    spec = spec_of(SHORT_MIXTURE, tmp_path)
    most = temp_bytes_at_most(spec)
    found = smaller_steps(spec, most, None)
    assert [n for n, _, _ in found] == [1024, 512, 256, 128, 64]
    sizes = [most, *(temp_bytes for _, temp_bytes, _ in found)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] > temp_bytes_of_experts(spec) / 2
    assert {count for _, _, count in found} == {40960 // spec.config.block_size}
    measured = smaller_steps(spec, most // 2, None)  # by a compiler
    assert max(temp_bytes for _, temp_bytes, _ in measured) <= most // 2
    # Attention in plain XLA may copy the pool, however few tokens there are.
    copying = dataclasses.replace(spec, no_kernel_reason="a reason")
    assert smaller_steps(copying, most + 1, None) == []
    assert smaller_steps(copying, most, None) == found


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_numbers_of_a_draft_model_are_those_of_a_model(num_devices, tmp_path):
    spec = spec_with_drafts(tmp_path, num_devices)
    found = numbers_of_drafts(spec)
    assert found is not None
    alone = numbers_of_model(spec_of(MODELS["Qwen2.5-0.5B"], tmp_path, num_devices))
    same = set(alone) - {"kv_groups"}
    assert {name: found["model"][name] for name in same} == {name: alone[name] for name in same}
    assert found["model"]["kv_groups"] == [[None, 24]]
    assert found["model"]["num_parameters"] == 494_032_768
    head = 151_936 * 896 // num_devices
    assert (found["model"]["head_bytes"], found["model"]["head_flops"]) == (2 * head, 2 * head)
    own = numbers_of_model(spec)
    experts = spec_of(SHORT_MIXTURE, tmp_path, num_devices)
    assert own == numbers_of_model(experts)
    assert spec.block_bytes == experts.block_bytes + found["model"]["block_bytes"]
    assert temp_bytes_at_most(spec) > temp_bytes_at_most(experts)
    assert numbers_of_drafts(experts) is None


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_head_reads_the_embedding_of_the_model(num_devices, tmp_path):
    """It multiplies with one layer and with the tokens that it knows."""
    config = HEAD | {"hidden_size": 2048, "vocab_size": 151_936, "num_attention_heads": 16}
    (tmp_path / "head.json").write_text(json.dumps(config))
    speculative = {"model": str(tmp_path / "head.json"), "num_speculative_tokens": 4}
    spec = spec_with_drafts(tmp_path, num_devices, speculative_config=speculative)
    found = numbers_of_drafts(spec)
    assert found is not None and spec.draft_model is not None
    size, inner, known, kv = 2048, 11_008, 32_000, 2 * 2 * 128
    # Attention, whose input is twice as wide, MLP, head; hidden states of three layers, norms.
    floats = size * (2 * size + size + 2 * kv + 3 * inner + known)
    floats += 3 * size * size + 4 * size
    model = found["model"]
    assert model["num_parameters"] == floats + known
    if num_devices == 1:  # the numbers of its tokens have four bytes
        assert model["weight_bytes"] == 2 * floats + 4 * known
    assert model["bytes_per_step"] == model["weight_bytes"]
    assert model["head_bytes"] == model["head_flops"] == 2 * known * size // num_devices
    gathered = Collective("all-gather", 1, 4 * known)
    assert (gathered in model["exchange"]) == (num_devices > 1)


def test_a_head_of_the_first_eagle_reads_the_lm_head_of_the_model(tmp_path):
    config = {name: each for name, each in HEAD.items() if name != "draft_vocab_size"}
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_attention_heads": 16}
    (tmp_path / "head.json").write_text(json.dumps(config))
    speculative = {"model": str(tmp_path / "head.json"), "num_speculative_tokens": 4}
    spec = spec_with_drafts(tmp_path, speculative_config=speculative)
    found, size, inner = numbers_of_drafts(spec), 2048, 11_008
    assert found is not None
    floats = size * (2 * size + 2 * size + 2 * 2 * 128 + 3 * inner) + size
    model, head = found["model"], 151_936 * 2048 * 2
    assert (model["num_parameters"], model["weight_bytes"]) == (floats, 2 * floats)
    assert model["head_bytes"] == model["head_flops"] == head
    assert model["bytes_per_step"] == model["flops_per_token"] == 2 * floats + head


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_mtp_layer_has_the_experts_of_a_layer_of_the_model(num_devices, tmp_path):
    """That of DeepSeek-V3, whose sizes are transformers' defaults."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    (tmp_path / "deepseek.json").write_text(json.dumps(config))
    options = {"method": "deepseek_mtp", "num_speculative_tokens": 1}
    path = str(tmp_path / "deepseek.json")
    spec = spec_with_drafts(tmp_path, num_devices, model=path, speculative_config=options)
    found = numbers_of_drafts(spec)
    assert found is not None
    model, size, expert = found["model"], 7168, 3 * 2048 * 7168
    attention = 1536 * (size + 128 * 192) + 512 * 128 * 256 + size * (512 + 64 + 128 * 128)
    norms = 5 * size + 1536 + 512
    others = attention + norms + 2 * size * size + 256 * (size + 1)  # with the router
    assert model["num_parameters"] == others + (256 + 1) * expert
    head = 129_280 * size // num_devices
    assert model["head_flops"] == 2 * head
    assert model["flops_per_token"] == 2 * (others + (8 + 1) * expert) // num_devices + 2 * head
    assert model["block_bytes"] == spec.block_bytes // 3
    assert model["kind"] == "the MTP layer"


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_mtp_layer_of_a_model_with_a_recurrent_state_has_attention(num_devices, tmp_path):
    """The shapes of Qwen3.5-35B-A3B: 16 query heads of 256, each with a gate, and 2 KV heads, which four devices have
    twice.
    """
    path = tmp_path / "qwen.json"
    path.write_text(json.dumps(RECURRENT["35B-A3B"] | {"mtp_num_hidden_layers": 1}))
    options = {"method": "qwen3_5_mtp", "num_speculative_tokens": 2}
    spec = spec_with_drafts(tmp_path, num_devices, model=str(path), speculative_config=options)
    found = numbers_of_drafts(spec)
    assert found is not None
    model, size, expert = found["model"], 2048, 3 * 512 * 2048
    attention = size * 256 * (2 * 16 + 2 * 2) + 16 * 256 * size
    others = 2 * size * size + 256 * size + size + 5 * size + 2 * 256
    assert model["num_parameters"] == attention + others + (256 + 1) * expert
    assert model["recurrence"] is None and model["kv_groups"] == [[None, 1]]
    assert model["block_bytes"] == spec.block_bytes // 3
    assert model["kind"] == "the MTP layer"


def test_attention_of_rows_with_drafts_has_tiles_of_its_own_on_tpus(tmp_path):
    """Of the model and of its draft model."""
    spec = spec_with_drafts(tmp_path)
    assert [pool.num_drafts for pool in spec.pools] == [4, 4]
    on_tpu = {"layout": "tpu", "attention": "tpu", "kernel_sizes": TileSizes(), "block_size": 128}
    pool = dataclasses.replace(spec.pool, **on_tpu)
    (kind,) = attention_kinds(dataclasses.replace(spec, pool=pool))
    tiles = {step: each["tile_q"] for step, each in kind["tiles"].items()}
    assert tiles == {"decode": 1, "prefill": 32, "drafts": 8}
    pool = dataclasses.replace(pool, num_drafts=spec_of(SHORT_MIXTURE, tmp_path).pool.num_drafts)
    (kind,) = attention_kinds(dataclasses.replace(spec, pool=pool))
    assert kind["tiles"].keys() == {"decode", "prefill"}


def test_prompt_lookup_has_drafts_without_a_model(tmp_path):
    speculative = {"method": "ngram", "num_speculative_tokens": 7}
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    spec = spec_with_drafts(tmp_path, speculative_config=speculative, **sizes)
    # 8 rows of 8 tokens.
    assert numbers_of_drafts(spec) == {"num_tokens": 7, "forward": "forward T=64", "model": None}
    small = spec_with_drafts(tmp_path, speculative_config=speculative, max_num_batched_tokens=256)
    drafts = numbers_of_drafts(small)
    assert drafts is not None and drafts["forward"] == "forward T=256"


def test_a_token_uses_a_ninth_of_qwen3_30b_a3b(tmp_path):
    numbers = numbers_of(spec_of(EXPERTS["Qwen3-30B-A3B"], tmp_path))
    assert numbers is not None
    assert (numbers["num_experts"], numbers["experts_per_token"]) == (128, 8)
    assert numbers["num_parameters"] == 30_532_122_624
    assert numbers["num_active"] == 3_353_032_704
    assert numbers["weight_bytes"] == 48 * 128 * 3 * 768 * 2048 * 2
    assert numbers_of(spec_of(MODELS["Qwen2.5-0.5B"], tmp_path)) is None


def test_tokens_do_not_pass_the_encoder_of_pictures(tmp_path):
    size, mlp, merged, text = 1280, 3420, 4 * 1280, 2048
    attention = 3 * size * (size + 1) + size * (size + 1)
    block = attention + 2 * mlp * (size + 1) + size * (mlp + 1) + 2 * size
    merger = size + merged * (merged + 1) + text * (merged + 1)
    tower = 32 * block + size * 3 * 2 * 14 * 14 + merger
    spec = spec_of(QWEN2_5_VL_3B | {"max_position_embeddings": 8192}, tmp_path)
    # Pictures of a prompt have 4 patches a token, and some token is no picture's.
    assert numbers_of_encoder(spec) == {
        "num_parameters": tower,
        "weight_bytes": 2 * tower,
        "largest": 4 * 8192,
    }
    layer = 2 * 2048 * 2048 + 2048 + 2 * (256 * 2048 + 256) + 3 * 2048 * 11008 + 2 * 2048
    assert num_active(spec.model) == 36 * layer + 151936 * 2048 + 2048
    assert numbers_of_encoder(spec_of(MODELS["Qwen2.5-0.5B"], tmp_path)) is None


@pytest.mark.parametrize(("num_devices", "count"), [(1, 0), (8, 48)])
def test_devices_add_up_what_their_experts_say(num_devices, count, tmp_path):
    spec = spec_of(EXPERTS["Qwen3-30B-A3B"], tmp_path, num_devices)
    assert exchange_of_experts(spec) == [Collective("all-reduce", count, 2 * 2048)] * (count > 0)


INT8_OF_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
        }
    },
}


@pytest.mark.parametrize(
    "method", [*METHODS.values(), INT8_OF_GROUPS], ids=[*METHODS, "int8 of groups"]
)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_devices_exchange_no_more_for_weights_with_groups_of_inputs(name, method, tmp_path):
    """Their scales and zeros are not multiplied, and rows of x are not rounded."""
    config = (MODELS | EXPERTS)[name] | {"num_hidden_layers": 2}
    expected = exchange_of(spec_of(config, tmp_path, 2))
    spec = spec_of(config | {"quantization_config": method}, tmp_path, 2)
    scales = [each for path, each in specs(spec.model).items() if path.endswith("q_proj.scale")]
    assert [each.axes for each in scales] == [("embed", "heads")] * 2
    assert exchange_of(spec) == expected


@pytest.mark.parametrize("num_devices", [1, 4])
def test_most_layers_of_qwen3_5_have_a_state_in_place_of_keys(num_devices, tmp_path):
    """The shapes of 4B, with two layers of attention in eight: 16 query heads and 4 KV heads of 256, each on a device
    of four.
    """
    spec = spec_of(RECURRENT["4B"], tmp_path, num_devices)
    found = numbers_of_model(spec)
    assert found["kv_groups"] == [[None, 2]]
    kv_bytes = 2 * 4 * 256 * 2 * spec.config.block_size // num_devices
    assert found["layer_block_bytes"] == kv_bytes and spec.block_bytes == 2 * kv_bytes
    (kind,) = found["attention_kinds"]
    assert (kind["layers"], kind["width"]) == (2, 16 * 256 // num_devices)
    # float32 states of 32 value heads, and three inputs of a convolution over 16 + 16 + 32 heads.
    state = 6 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128)
    products = 4 * 16 * 64 * 128 + 32 * (4 * 64 * 64 * 6 + 2 * 64 * 384 + 6 * 128 * 128)
    assert found["recurrence"] == {
        "sequence_bytes": state // num_devices,
        "num_cached": spec.step_spec.num_cached_states,
        "flops_per_token": 6 * 7 * 32 * 128 * 128 // num_devices,
        "flops_in_prompts": 6 * products // num_devices,
    }
    num_states = spec.config.max_num_seqs + spec.step_spec.num_cached_states
    assert spec.lowerings().state_bytes > num_states * state // num_devices
    assert numbers_of_model(spec_of(MODELS["Qwen2.5-0.5B"], tmp_path))["recurrence"] is None


def test_rows_with_drafts_have_a_window_each(tmp_path):
    """Of 16 tokens for up to 4 drafts: those of two steps, and one token."""
    spec = spec_of(RECURRENT["4B"], tmp_path)
    without = temp_bytes_of_recurrence(spec)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = dataclasses.replace(spec.config, speculative_config=drafts)
    more = temp_bytes_of_recurrence(dataclasses.replace(spec, config=config)) - without
    assert more == 4 * 16 * spec.config.max_num_seqs * 32 * 4 * (128 + 128 + 64)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_layers_that_only_convolve_have_inputs_and_no_products(num_devices, tmp_path):
    """Of LFM2-1.2B, two inputs of 2,048 channels in each of two layers of three."""
    kinds = ["conv", "full_attention", "conv"]
    names = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "dtype": "bfloat16"}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 3, "layer_types": kinds}
    spec = spec_of(names | sizes, tmp_path, num_devices)
    found = numbers_of_model(spec)
    assert found["kv_groups"] == [[None, 1]]
    assert found["recurrence"] == {
        "sequence_bytes": 2 * 2 * 2048 * 2 // num_devices,
        "num_cached": spec.step_spec.num_cached_states,
        "flops_per_token": 0,
        "flops_in_prompts": 0,
    }
    assert temp_bytes_of_recurrence(spec) == 0


@pytest.mark.parametrize("num_devices", [1, 4])
def test_latents_are_whole_on_each_device(num_devices, tmp_path):
    """A token has 576 numbers in a layer, from which four devices compute four of 16 heads each."""
    spec = spec_of(DEEPSEEK_V2_LITE | {"num_hidden_layers": 3}, tmp_path, num_devices)
    found = numbers_of_model(spec)
    assert found["kv_groups"] == [[None, 3]]
    assert found["layer_block_bytes"] == 576 * 2 * spec.config.block_size
    (kind,) = found["attention_kinds"]
    heads = 16 // num_devices
    assert (kind["layers"], kind["width"]) == (3, heads * 512)
    # A product with a key, and one with the part of it that is the value.
    assert kind["flops"] == 2 * heads * (576 + 512)
    if num_devices > 1:  # after attention and MLP, after the embedding, and of experts
        size = 2048 * 2
        assert [each for each in found["exchange"] if each.kind == "all-reduce"] == [
            Collective("all-reduce", 3 + 3, size),
            Collective("all-reduce", 1, size),
            Collective("all-reduce", 2, size),
        ]


def test_queries_of_many_heads_in_the_latents_space_are_wider_than_an_mlp(tmp_path):
    few, many = (
        spec_of(
            DEEPSEEK_V2_LITE
            | {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads},
            tmp_path,
        )
        for heads in (16, 128)
    )
    wider = 128 * 576 - 10944
    more = temp_bytes_at_most(many) - temp_bytes_at_most(few)
    assert more == 4 * 2 * many.config.max_num_batched_tokens * wider


def test_layers_of_gemma_4_differ_in_heads(tmp_path):
    """16 query heads of 256 in layers with a window, of 512 in the others; four devices have four each."""
    for num_devices in (1, 4):
        kinds = numbers_of_model(spec_of(GEMMA_4["26B-A4B"], tmp_path, num_devices))[
            "attention_kinds"
        ]
        assert [(kind["window"], kind["layers"], kind["width"]) for kind in kinds] == [
            (1024, 10, 16 * 256 // num_devices),
            (None, 2, 16 * 512 // num_devices),
        ]
