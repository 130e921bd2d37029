"""Gemma 4 in whole engines: its layers share arrays of the pool, keys and values, and have embeddings of their own."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage import SamplingParams
from tests import dense_families, mixtures
from tests.adapters import lora, merged, save_adapter
from tests.checkpoints import TIGHT, make_llm
from tests.end_to_end import test_quantised_pools
from tests.end_to_end.test_parity import prompts_of, torch_logits_of

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = prompts_of([100, 37, 60, 5])
# Three KV heads with a window and one of twice the size without: a layer without a window leaves lanes unused.
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 1}
# And blocks, fewer than all requests need.
CASES = [
    pytest.param("gemma4", 0, {"global_head_dim": 4}, 48, id="smaller heads without a window"),
    pytest.param("gemma4", 1, UNEVEN | {"hidden_size": 48}, 48, id="unused lanes"),
    pytest.param("gemma4_moe", 0, {}, 66, id="two layers in an array"),
]


def build(family, variant, path, **overrides):
    builder = mixtures if family in mixtures.VARIANTS else dense_families
    return builder.build(family, variant, path, **overrides)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_transformers(path, prompts, found):
    for ours, logits in zip(found, torch_logits_of(path, prompts, found), strict=True):
        assert ours == logits.argmax(axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant", "overrides", "num_blocks"), CASES)
def test_tokens_are_those_of_transformers(family, variant, overrides, num_blocks, tmp_path):
    """In chunks, preempted, and then with what the cache has."""
    path = build(family, variant, tmp_path, **overrides)
    options: dict[str, Any] = TIGHT | {"num_gpu_blocks_override": num_blocks, "max_model_len": 128}
    llm = make_llm(path, **options)
    found = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert_transformers(path, PROMPTS, found)
    assert llm.stats().num_preemptions > 0
    hits = llm.stats().prefix_cache_hits
    longer = [prompt + answer for prompt, answer in zip(PROMPTS[1:], found[1:], strict=True)]
    for prompt in longer:
        llm.generate([prompt], GREEDY, use_tqdm=False)
        again = tokens(llm.generate([prompt], GREEDY, use_tqdm=False))
        assert_transformers(path, [prompt], again)
    assert llm.stats().prefix_cache_hits > hits


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_adapters_of_layers_that_lack_projections(num_devices, tmp_path):
    """Layers without a window have no v_proj. On one device projections are joined."""
    base = build("gemma4", 1, tmp_path / "hf")
    kinds = [{}, {"rank": 2, "targets": ("q_proj", "v_proj")}, {"targets": ("k_proj", "o_proj")}]
    adapters = [
        save_adapter(tmp_path / str(number), base, seed=number, **kind)
        for number, kind in enumerate(kinds)
    ]
    options = {"max_loras": 3, "max_lora_rank": 8, "tensor_parallel_size": num_devices}
    llm = make_llm(base, enable_lora=True, **options)
    requests = [lora(number, adapter) for number, adapter in enumerate(adapters, 1)]
    found = tokens(llm.generate(PROMPTS[1:], GREEDY, lora_request=requests, use_tqdm=False))
    for number, adapter in enumerate(adapters):
        path = merged(tmp_path / f"merged {number}", base, adapter)
        assert_transformers(path, [PROMPTS[1 + number]], [found[number]])
    assert len({*map(tuple, found)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "family", "overrides"),
    [("int4", "gemma4", UNEVEN | {"hidden_size": 48}), ("fp8_e4m3", "gemma4_moe", {})],
)
def test_pools_that_several_layers_share_may_be_quantised(
    kv_cache_dtype, family, overrides, tmp_path
):
    path = build(family, int(family == "gemma4"), tmp_path, **overrides)
    test_quantised_pools.test_logprobs_are_those_of_a_dense_model_with_rounded_keys_and_values(
        kv_cache_dtype, path
    )


def test_embeddings_as_prompts_are_refused_where_layers_have_their_own(tmp_path):
    """They are of tokens, which such a prompt does not have."""
    path = dense_families.build("gemma4", 0, tmp_path)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True: Gemma4ForCausalLM has an emb"):
        make_llm(path, enable_prompt_embeds=True)
