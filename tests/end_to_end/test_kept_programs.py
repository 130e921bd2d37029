"""A second start finds its programs on disk, and what they depend on is all in the facts they are kept by."""

from __future__ import annotations

import logging

import jax
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.aot.compile import compile_for
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.runner.lowering import ADMIT, Lowerings
from tests import checkpoints

OPTIONS = dict(
    skip_tokenizer_init=True,
    dtype="float32",
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    num_gpu_blocks_override=16,
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2")))


def start(path, cache, **options) -> tuple[dict[str, str], list[int], LLM]:
    """Where each program came from, and what they compute."""
    llm = LLM(path, compilation_cache_dir=str(cache), **(OPTIONS | options))
    output = llm.generate([list(range(3, 12))], GREEDY, use_tqdm=False)[0].outputs[0]
    llm.wait_until_warm()
    return {p.name: p.origin for p in llm.programs() if p.origin}, output.token_ids, llm


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_computes_the_same(path, tmp_path, caplog, fresh_cache):
    first, tokens, _ = start(path, tmp_path)
    assert "stored" not in first.values()
    second, again, llm = start(path, tmp_path)
    assert set(second.values()) == {"stored"} and second.keys() == first.keys()
    assert again == tokens and llm._engine.runner.num_recompiles == 0
    with caplog.at_level(logging.DEBUG, "jaxpage"):
        other, _, _ = start(path, tmp_path, num_gpu_blocks_override=17)
    assert "stored" not in other.values()
    assert "do not match this start: KV pool: ..." in caplog.text
    assert "num_blocks=16" in caplog.text and "num_blocks=17" in caplog.text


@pytest.mark.slow
def test_compile_prepares_a_start_from_config_json_alone(path, tmp_path, capsys, fresh_cache):
    options = {k: v for k, v in OPTIONS.items() if k != "num_gpu_blocks_override"}
    compile_for(options | {"model": f"{path}/config.json"}, tmp_path, None)
    assert "programs for 9 KV blocks" in capsys.readouterr().out
    origins, _, llm = start(path, tmp_path, num_gpu_blocks_override=None)
    assert set(origins.values()) == {"stored"}
    assert llm.config.num_gpu_blocks_override == 9  # two sequences of 64 tokens, and the null block


@pytest.mark.slow
def test_compile_prepares_a_start_with_a_draft_model_from_config_json_alone(
    path, tmp_path, fresh_cache
):
    def with_drafts(model: str) -> dict:
        return {"speculative_config": {"model": model, "num_speculative_tokens": 3}}

    config = f"{path}/config.json"
    compile_for(OPTIONS | with_drafts(config) | {"model": config}, tmp_path, None)
    origins, _, llm = start(path, tmp_path, **with_drafts(path))
    assert set(origins.values()) == {"stored"} and "draft R=2" in origins
    assert llm.stats().num_accepted_tokens > 0


@pytest.mark.slow
def test_compile_and_start_agree_on_windows_that_a_fitted_length_does_not_reach(
    tmp_path, fresh_cache
):
    """Layers are grouped by the model's length, whatever then fits into the pool."""
    longer = dict(max_position_embeddings=2048, sliding_window=512)
    path = str(checkpoints.build("gemma3", 1, tmp_path / "gemma3", **longer))
    options = dict(max_model_len="auto", num_gpu_blocks_override=None, kv_cache_memory_bytes=30_000)
    compile_for(OPTIONS | options | {"model": f"{path}/config.json"}, tmp_path / "cache", None)
    origins, _, llm = start(path, tmp_path / "cache", **options)
    assert set(origins.values()) == {"stored"}
    windows = llm._engine.runner.groups.windows
    assert len(windows) > 1 and llm.config.max_model_len < min(w for w in windows if w)


def engine_of(path, **options) -> tuple[dict[str, str], Lowerings]:
    engine = EngineConfig.from_options(model=path, **(OPTIONS | options))
    spec = make_engine_spec(engine, device=jax.devices("cpu")[0], device_memory=None)
    spec.transform_weights()
    sized = spec.with_blocks(spec.config.num_gpu_blocks_override)
    return sized.fingerprint(), sized.lowerings()


VARIATIONS = (
    {"dtype": "bfloat16"},
    {"max_model_len": 48},
    {"block_size": 8},
    {"num_gpu_blocks_override": 17},
    {"kv_cache_dtype": "int8"},
    {"max_num_seqs": 4},
    {"decode_steps": 2},
    {"swap_space": 0.001},
    {"quantization": "int8"},
    {"max_logprobs": 3},
    {"logprobs_mode": "processed"},
    {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}},
)


@pytest.mark.slow
def test_whatever_changes_a_program_changes_the_facts(path):
    """And what changes none does not, or a start would compile for nothing."""
    facts, lowerings = engine_of(path)
    names = [ADMIT, "decode R=2", "forward T=16", "sample R=2"]

    def text(lowerings, name):
        return lowerings.programs[name]().as_text() if name in lowerings.programs else ""

    before = {name: text(lowerings, name) for name in names}

    def changed(other):
        """Lowers programs up to the first one that is different."""
        return other.programs.keys() != lowerings.programs.keys() or any(
            text(other, name) != before[name] for name in names
        )

    for options in VARIATIONS:
        other_facts, other = engine_of(path, **options)
        assert changed(other) and other_facts != facts, options
    for options in (
        {"seed": 5},
        {"enable_prefix_caching": False},
        {"scheduling_policy": "priority"},
    ):
        other_facts, other = engine_of(path, **options)
        assert not changed(other) and other_facts == facts, options
    assert jax.default_backend() == "cpu"
