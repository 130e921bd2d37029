"""Quantised checkpoints through the engine: the tokens of transformers with the dequantised weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.rl import Sampler
from jaxpage.rl.module import load_module
from jaxpage.start_up_log import model_line
from tests import checkpoints, dense_families, mixtures
from tests.adapters import lora, merged, save_adapter
from tests.end_to_end.test_parity import log_softmax, prompts_of, torch_logits_of
from tests.few_programs import few_programs
from tests.quantized_checkpoints import FORMATS, write, write_float

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = prompts_of([3, 40, 17])
# family, format, layers with quantised weights once projections are joined
CASES = [
    ("qwen2", "awq-g32", 8),
    ("phi3", "gptq-4-asym", 8),
    ("qwen3_moe", "fp8-block", 6),
    ("mixtral", "awq-g32", 8),
    ("olmoe", "ct-w8a16", 8),
    ("glm4_moe", "awq-g32", 10),
    ("llama", "ct-w4a16-asym", 8),
    ("mistral", "gptq-8-g128", 8),
    ("qwen3", "ct-fp8-dynamic", 8),
    ("qwen2", "gptq-4-act-order", 0),
    ("qwen3_5", "fp8-block", 16),
    ("qwen3_5_moe", "awq-g32", 24),
    ("qwen3_next", "fp8-block", 24),
    ("qwen3_next", "gptq-4-asym", 24),
    ("granite_hybrid", "ct-fp8-dynamic", 12),
    ("granite_hybrid_moe", "fp8-block", 12),
    ("nemotron_h", "fp8-block", 10),
    ("nemotron_h_moe", "fp8-block", 12),
    ("nemotron_h_moe", "awq-g32", 12),
    ("lfm2", "ct-fp8-dynamic", 16),
    ("falcon_h1", "fp8-block", 12),
    ("lfm2_moe", "fp8-block", 12),
    ("lfm2_moe", "awq-g32", 12),
    # All of attention but kv_b_proj, and an MLP in one layer.
    ("deepseek_v3", "fp8-block", 14),
    ("deepseek_v2", "awq-g32", 12),
]
_RECURRENT = dense_families.qwen3_5(4, head_dim=32, heads=(2, 4), dims=(64, 64))
_LATENT = mixtures.latent(128, 32, 32, 32, queries=128, num_key_value_heads=4)
_NEMOTRON_H = {"head_dim": 32, "n_groups": 2, "ssm_state_size": 32}
_NEMOTRON_H |= {"mamba_num_heads": 8, "mamba_head_dim": 32}
# Of a family: its own sizes, and the layers that released checkpoints leave as floats.
OWN_SIZES = {
    "qwen3_5": _RECURRENT,
    "qwen3_5_moe": _RECURRENT | {"shared_expert_intermediate_size": 128},
    "deepseek_v2": _LATENT | {"q_lora_rank": None},
    "deepseek_v3": _LATENT,
    "qwen3_next": _RECURRENT
    | {"shared_expert_intermediate_size": 128, "rope_parameters": mixtures.PARTIAL},
    "nemotron_h": _NEMOTRON_H,
    "lfm2": {"num_hidden_layers": 4, "block_multiple_of": 128},
    "lfm2_moe": {"num_hidden_layers": 3},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_d_ssm": 256},
    "nemotron_h_moe": _NEMOTRON_H | {"moe_shared_expert_intermediate_size": 128},
} | dict.fromkeys(
    ("granite_hybrid", "granite_hybrid_moe"),
    {
        "num_hidden_layers": 3,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "shared_intermediate_size": 128,
    },
)
FLOATS = dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen3_next"), ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba")
)


class Checkpoint:
    """A quantised checkpoint, and the same as floats."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        form: str = "awq-g32",
        kept: tuple[str, ...] = ("lm_head",),
    ):
        self.path, self.floats = folder / "quantised", folder / "floats"
        self.weights = write(source, self.path, FORMATS[form], ignore=kept)
        write_float(source, self.floats, self.weights)


def build(family: str, folder: Path, **options) -> Path:
    kinds = [kind for kind in (mixtures, dense_families) if family in kind.VARIANTS]
    kind = kinds[0] if kinds else checkpoints
    sizes = SIZES | ({"moe_intermediate_size": 128} if kind is mixtures else {})
    sizes |= OWN_SIZES.get(family, {}) | options
    return kind.build(family, 0, folder, **sizes)


def make_llm(path: Path, **options) -> LLM:
    return checkpoints.make_llm(path, **({"enforce_eager": True} | options))


def answers(llm: LLM, **options) -> list[checkpoints.Answer]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, **options)
    completions = [output.outputs[0] for output in outputs]
    return [
        (
            list(c.token_ids),
            [row[t].logprob for row, t in zip(c.logprobs, c.token_ids, strict=True)],
        )
        for c in completions
    ]


def assert_transformers(path: Path, got: list[checkpoints.Answer]) -> None:
    """The tokens of the float32 checkpoint, and their log-probabilities within 1e-4."""
    tokens = [each for each, _ in got]
    for (ours, logprobs), logits in zip(got, torch_logits_of(path, PROMPTS, tokens), strict=True):
        assert ours == logits.argmax(axis=-1).tolist()
        expected = log_softmax(logits)[np.arange(len(ours)), ours]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4, rtol=0)


def num_quantised(llm: LLM) -> int:
    return sum(path.endswith("scale") for path in llm._memory._variables)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("awq")
    return Checkpoint(folder, build("qwen2", folder / "source"))


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[checkpoints.Answer]:
    return answers(make_llm(checkpoint.path))


def test_tokens_of_one_layer_are_those_of_transformers(tmp_path):
    source = build("qwen2", tmp_path / "source", num_hidden_layers=1)
    checkpoint = Checkpoint(tmp_path, source)
    llm = make_llm(checkpoint.path)
    assert num_quantised(llm) == 4
    assert_transformers(checkpoint.floats, answers(llm))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form", "count"), CASES)
def test_tokens_are_those_of_transformers(family, form, count, tmp_path):
    kept = FLOATS.get(family, ("lm_head",))
    checkpoint = Checkpoint(tmp_path, build(family, tmp_path / "source"), form, kept)
    llm = make_llm(checkpoint.path)
    assert num_quantised(llm) == count
    assert_transformers(checkpoint.floats, answers(llm))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_several_devices(num_devices, checkpoint, expected):
    llm = make_llm(checkpoint.path, tensor_parallel_size=num_devices)
    assert num_quantised(llm) == 14
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq-g32", "ct-fp8-dynamic"])
def test_experts_stay_packed(form, tmp_path):
    """The same tokens and log-probabilities as with floats, on one device and on two; asleep, replaced, at random."""
    checkpoint = Checkpoint(tmp_path, build("qwen3_moe", tmp_path / "source"), form)
    floats = make_llm(checkpoint.path, quantization="dequantize")
    expected = answers(floats)
    llm = make_llm(checkpoint.path, enforce_eager=False)
    assert num_quantised(llm) == 8 and num_quantised(floats) == 0
    assert bytes_of_experts(llm) < bytes_of_experts(floats) * (0.2 if "awq" in form else 0.27)
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    llm.sleep()
    llm.wake_up()
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    llm.update_weights(str(checkpoint.path))
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"according to config.json, but the checkpoint has it as"):
        llm.update_weights(str(checkpoint.floats))
    assert llm.stats().num_recompiles == 0
    divided = make_llm(checkpoint.path, tensor_parallel_size=2)
    checkpoints.assert_same_answers(answers(divided), expected, atol=1e-4)
    assert answers(make_llm(checkpoint.path, load_format="dummy"))


def bytes_of_experts(llm: LLM) -> int:
    variables = llm._memory._variables
    return sum(variables[path].get_value().nbytes for path in variables if ".experts." in path)


@pytest.mark.slow
def test_adapters(checkpoint, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", checkpoint.floats, seed=1, rank=4)
    llm = make_llm(checkpoint.path, enable_lora=True)
    assert_transformers(checkpoint.floats, answers(llm))
    got = answers(llm, lora_request=lora(1, adapter))
    assert_transformers(merged(tmp_path / "merged", checkpoint.floats, adapter), got)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"quantization": "dequantize"}, {"quantization": "dequantize", "numerics": "strict"}],
)
def test_floats_on_request(options, checkpoint, expected):
    llm = make_llm(checkpoint.path, **options)
    assert num_quantised(llm) == 0
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)


def test_the_option_names_the_checkpoints_own_method_or_what_to_do(checkpoint):
    for name in ("awq", "awq_marlin", None):
        config = make_llm(checkpoint.path, quantization=name, load_format="dummy").model_config
        assert config.quantization == "awq"
    assert make_llm(checkpoint.floats, load_format="dummy").model_config.quantization is None
    lines = [
        model_line(make_llm(path, load_format="dummy")._memory._spec)
        for path in (checkpoint.path, checkpoint.floats)
    ]
    numbers = [line.partition(", ")[2].partition(" in ")[0] for line in lines]
    assert numbers[0] == numbers[1] and numbers[0].endswith("parameters")
    with pytest.raises(ValueError, match=r"quantization='gptq', but .* the weights are awq"):
        make_llm(checkpoint.path, quantization="gptq")
    with pytest.raises(ValueError, match=r"quantization='fp8', but .* the weights are awq"):
        make_llm(checkpoint.path, quantization="fp8")
    with pytest.raises(ValueError, match=r"quantization='gptq', but .* are not quantised"):
        make_llm(checkpoint.floats, quantization="gptq")
    with pytest.raises(ValueError, match="strict.* is not for quantization='awq'"):
        make_llm(checkpoint.path, numerics="strict")


@pytest.mark.slow
def test_rounding_to_int8_begins_with_the_dequantised_weights(checkpoint):
    rounded = answers(make_llm(checkpoint.path, quantization="int8"))
    same = answers(make_llm(checkpoint.floats, quantization="int8"))
    checkpoints.assert_same_answers(rounded, same, atol=1e-4)


@pytest.mark.slow
def test_weights_are_replaced_and_sleep(checkpoint, expected, tmp_path):
    llm = make_llm(checkpoint.path, enforce_eager=False)
    llm.sleep()
    llm.wake_up()
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"according to config.json, but the checkpoint has it as"):
        llm.update_weights(str(checkpoint.floats))
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    changed = {
        n: x[::-1] if n.endswith("up_proj.weight") else x for n, x in checkpoint.weights.items()
    }
    other = Checkpoint(tmp_path, write_float(checkpoint.floats, tmp_path / "changed", changed))
    llm.update_weights(str(other.path))
    assert_transformers(other.floats, answers(llm))
    assert llm.stats().num_recompiles == 0


def test_the_engines_folder_may_be_written_anew(checkpoint, tmp_path):
    """Which layers are quantised is decided at the start, not by what is in the folder later."""
    folder = Path(shutil.copytree(checkpoint.path, tmp_path / "steps"))
    llm = make_llm(folder)
    shutil.rmtree(folder)
    shutil.copytree(checkpoint.floats, folder)
    with pytest.raises(ValueError, match=r"according to config.json, but the checkpoint has it as"):
        llm.update_weights(folder)
    shutil.rmtree(folder)
    assert llm.update_weights(checkpoint.path) == 1


def test_new_weights_for_other_inputs_change_nothing(checkpoint, tmp_path):
    """Of integers by output, only config.json says whether they are for inputs that are rounded."""
    rounded, exact = (tmp_path / name for name in ("w8a8", "w8a16"))
    write(checkpoint.floats, rounded, FORMATS["ct-w8a8"])
    shutil.copytree(rounded, exact)
    config = json.loads((exact / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (exact / "config.json").write_text(json.dumps(config))
    llm = make_llm(rounded)
    before = {path: each.get_raw_value() for path, each in llm._memory._variables.items()}
    with pytest.raises(ValueError, match="not rounded to int8, and the model rounds them"):
        llm.update_weights(exact)
    assert llm.weight_version() == 0
    assert all(x.get_raw_value() is before[path] for path, x in llm._memory._variables.items())
    assert llm.update_weights(rounded) == 1


@pytest.mark.slow
def test_a_trainers_floats_may_come_from_a_quantised_checkpoint(checkpoint, expected):
    module = load_module(str(checkpoint.path), dtype="float32")
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
    with few_programs():
        sampler = Sampler(module, str(checkpoint.path), **options)
    rollout = sampler.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    assert rollout.token_ids.tolist() == [tokens for tokens, _ in expected]


@pytest.mark.slow
def test_weights_may_be_apart_from_their_config(checkpoint, expected, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(checkpoint.path / "model.safetensors")
    llm = make_llm(tmp_path, hf_config_path=str(checkpoint.path))
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights(str(tmp_path))
    llm.wake_up()
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)


def test_embeddings_of_a_quantised_decoder(checkpoint, tmp_path):
    config = json.loads((checkpoint.path / "config.json").read_text())
    how = {"quantization_config": config.pop("quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint.path / "model.safetensors")
    # Compiled at their first use: two engines that write the same programs at once disturb each other in the cache.
    options = {"runner": "pooling", "dtype": "float32", "skip_tokenizer_init": True}
    options |= {"enforce_eager": True, "max_model_len": 64}
    got, expected = (
        [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
        for llm in (
            LLM(str(tmp_path), hf_overrides=how, **options),
            LLM(str(checkpoint.floats), **options),
        )
    )
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)
