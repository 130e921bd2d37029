"""EAGLE heads draft what the same heads draft in torch, and a request has the tokens that it has without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, SamplingParams
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.eagle_config import method_of_head
from jaxpage.engine_spec import EngineSpec
from jaxpage.weights.head import abstract_head
from tests import checkpoints, eagle_heads, picture_models
from tests.checkpoints import VOCAB_SIZE, answers, assert_same_answers, make_llm
from tests.eagle_heads import CONFIG, FirstHead, Head, Target
from tests.end_to_end import test_pictures
from tests.end_to_end.test_draft_model import requests
from tests.picture_targets import PictureTarget

NUM_DRAFTS = 3
PLAIN = {"enforce_eager": True}


def drafts_of(folder, **options) -> dict:
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": config | options}


def prompts() -> list[dict]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(3, VOCAB_SIZE, n).tolist()} for n in (5, 18, 40, 9)]


def greedy(num_tokens: int = 30) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(llama):
    return Target(llama)


@pytest.fixture(scope="module")
def expected(llama):
    return answers(make_llm(llama, **PLAIN), *requests())


@pytest.fixture(scope="module")
def trained(target, llama, tmp_path_factory):
    """A head that has learned the answers to `prompts` and `requests`, and its folder."""
    llm, (others, params) = make_llm(llama, **PLAIN), requests()
    outputs = llm.generate(prompts(), greedy(40), use_tqdm=False)
    outputs += llm.generate(others, params, use_tqdm=False)
    sequences = [
        [*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs
    ]
    # It knows most of their tokens.
    head = Head(CONFIG | {"draft_vocab_size": 200}, target.embedding)
    eagle_heads.train(head, target, sequences, steps=150)
    return head, head.save(tmp_path_factory.mktemp("trained"))


def check_drafts(llm: LLM, head: Head | FirstHead, target: Target) -> list[int]:
    """From now on, that drafts are those of torch. Returns as `watch`."""

    def check(tokens: list[int], drafts: list[int]) -> None:
        hidden, given = (
            target.hidden(tokens[:-1], head.layer_ids),
            target.given(tokens, len(drafts)),
        )
        assert drafts == head.drafts(tokens, hidden, len(drafts), given)

    return watch(llm, check)


def watch(llm: LLM, see: Callable[[list[int], list[int]], None]) -> list[int]:
    """From now on, after each launch of `draft`, call `see` with the tokens and the drafts of each row that has some.
    Returns the number of drafts in each launch, which grows.
    """
    runner = llm._engine.runner
    run, counts = runner._run, []

    def run_and_see(name, *buffers):
        result = run(name, *buffers)
        if name.startswith("draft"):
            layout, (packed,) = runner._lowerings.layouts[name], buffers
            fields = ("slots", "starts", "num_tokens", "num_drafts")
            rows = zip(*(layout.view(packed, field).tolist() for field in fields), strict=True)
            token_ids = np.asarray(runner._state["token_ids"])
            for slot, start, num_tokens, num_drafts in rows:
                known = start + num_tokens - num_drafts
                if num_drafts:
                    whole = token_ids[slot, : known + num_drafts].tolist()
                    see(whole[:known], whole[known:])
            counts.append(sum(layout.view(packed, "num_drafts").tolist()))
        return result

    runner._run = run_and_see
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.deep),
        pytest.param({"max_num_batched_tokens": 16, "block_size": 4}, id="chunks"),
        pytest.param({"tensor_parallel_size": 2}, id="two devices"),
    ],
)
def test_drafts_of_a_trained_head_are_those_of_torch_and_often_right(
    options, trained, target, llama
):
    head, folder = trained
    expected = answers(make_llm(llama, **PLAIN), prompts(), greedy())
    llm = make_llm(llama, **PLAIN, **drafts_of(folder), **options)
    counts = check_drafts(llm, head, target)
    assert_same_answers(answers(llm, prompts(), greedy()), expected, atol=2e-4)
    stats = llm.stats()
    assert sum(counts) == stats.num_draft_tokens > 100
    # 30 tokens of each of four prompts, which took 30 steps without drafts.
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 4 and len(counts) < 24


OTHERS = {
    "its own embedding, of another size": {
        "hidden_size": 48,
        "target_hidden_size": 32,
        "draft_vocab_size": None,
    },
    "two layers": {"num_hidden_layers": 2, "norm_before_residual": True},
    "the last hidden states": {
        "eagle_aux_hidden_state_layer_ids": [],
        "eagle_config": {"use_aux_hidden_state": False},
    },
    "more norms": {"fc_norm": True, "norm_output": True},
    "the outputs of layers": {"eagle_aux_hidden_state_layer_ids": [1, 3]},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_heads_draft_what_they_draft_in_torch(changes, target, llama, tmp_path):
    head = Head(CONFIG | changes, target.embedding)
    changes = {"architectures": ["Eagle3LlamaForCausalLM"]}
    if head.layer_ids == [1, 3]:  # as SGLang and SpecForge write it
        changes["eagle_aux_hidden_state_layer_ids"] = None
        changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    check_random(head, head.save(tmp_path, **changes), target, llama)


@pytest.mark.slow
def test_a_head_in_the_format_of_speculators(target, llama, tmp_path):
    head = Head(CONFIG | {"norm_before_residual": True}, target.embedding)
    head.save(tmp_path)
    outer = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "tie_word_embeddings")
    layer = {k: v for k, v in head.config.items() if k not in (*outer, "norm_before_residual")}
    values = {name: CONFIG[name] for name in outer} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "target_hidden_size": None,
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    check_random(head, tmp_path, target, llama)


@pytest.mark.slow
def test_a_scaled_embedding_is_read_without_its_factor(tmp_path):
    """Of Gemma, whose layers have windows, and norms behind attention and MLP. As in vLLM."""
    path = checkpoints.build("gemma3", 0, tmp_path / "model")
    target = Target(path)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    head = Head(CONFIG | layers, target.embedding)
    check_random(head, head.save(tmp_path / "head"), target, path, enable_prefix_caching=False)


@pytest.mark.slow
def test_a_head_that_names_no_layers_reads_those_that_it_does_in_vllm(tmp_path):
    path = checkpoints.build("qwen3", 0, tmp_path / "model", num_hidden_layers=9)
    target = Target(path)
    head = Head(CONFIG | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, target.embedding)
    folder = head.save(tmp_path / "head", eagle_aux_hidden_state_layer_ids=None)
    check_random(head, folder, target, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="llama", marks=pytest.mark.deep),
        pytest.param("qwen2", {}, id="tied"),
        pytest.param("llama", {"tensor_parallel_size": 2}, id="two devices"),
    ],
)
def test_a_head_of_the_first_eagle(family, options, tmp_path):
    """It uses embedding and LM head of the model, which may be one."""
    path = checkpoints.build(family, 0, tmp_path / "model")
    target = Target(path)
    head = FirstHead(target, bias=family == "llama")
    check_random(head, head.save(tmp_path / "head"), target, path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_head_of_the_first_eagle_uses_the_int8_head_of_the_model(family, tmp_path):
    path = checkpoints.build(family, 0, tmp_path / "model")
    folder = FirstHead(Target(path), bias=False).save(tmp_path / "head")
    options = PLAIN | {"quantization": "int8"}
    expected = answers(make_llm(path, **options), prompts(), greedy())
    llm = make_llm(path, **options, **drafts_of(folder, method="eagle"))
    assert_same_answers(answers(llm, prompts(), greedy()), expected, atol=2e-4)
    assert llm.stats().num_draft_tokens > 100


def check_random(head: Head | FirstHead, folder, target: Target, path, **options) -> None:
    """The drafts of a head that has learned nothing, by the method that its config.json says."""
    llm = make_llm(path, **PLAIN, **drafts_of(folder, method=None), **options)
    counts = check_drafts(llm, head, target)
    llm.generate(prompts(), greedy(8), use_tqdm=False)
    assert sum(counts) == llm.stats().num_draft_tokens > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_gpu_blocks_override": 24}, id="preempted"),
        pytest.param(
            {"num_gpu_blocks_override": 24, "swap_space": 0.01, "preemption_mode": "swap"},
            id="swapped",
        ),
        pytest.param({"max_num_batched_tokens": 16, "block_size": 4}, id="chunks"),
        pytest.param({"tensor_parallel_size": 2}, id="two devices"),
        pytest.param({"data_parallel_size": 2}, id="two replicas"),
        pytest.param({"quantization": "int8", "kv_cache_dtype": "int8"}, id="int8"),
    ],
)
def test_tokens_are_those_without_drafts(options, trained, llama, expected):
    """Sampled ones too, of two sequences of a prompt, and where the prompt is found in the prefix cache."""
    _, folder = trained
    if "quantization" in options:
        expected = answers(make_llm(llama, **PLAIN, **options), *requests())
    llm = make_llm(llama, **PLAIN, **drafts_of(folder), **options)
    few_blocks = "num_gpu_blocks_override" in options
    for _ in range(2):
        assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
        stats = llm.stats()
        # The answers of the int8 model are not what the head has learned.
        least = 0.0 if "quantization" in options else 1 / 8
        assert stats.num_accepted_tokens > stats.num_draft_tokens * least
        assert not stats.num_blocks_used and (stats.num_preemptions > 0) == few_blocks
    assert stats.prefix_cache_hits > 0 or few_blocks


@pytest.mark.slow
def test_nothing_compiles_after_start_up(trained, llama, expected):
    """Rows without drafts share steps with others, and the weights leave the device for a while."""
    _, folder = trained
    llm = make_llm(llama, **drafts_of(folder))
    llm.wait_until_warm()
    whole = SamplingParams(temperature=0, max_tokens=6, logprobs=-1, ignore_eos=True)
    llm.add_request("whole vocabulary", {"prompt_token_ids": [5, 6, 7]}, whole)
    llm.step()
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    first = llm.stats().num_accepted_tokens
    llm.sleep()
    llm.wake_up()
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    assert llm.stats().num_recompiles == 0
    assert llm.stats().num_accepted_tokens >= 2 * first > 0


@pytest.mark.slow
def test_update_weights_changes_what_the_head_reads(trained, target, llama, tmp_path):
    """Hidden states and embedding are the new model's, and the head is the old one."""
    head, folder = trained
    shape = checkpoints.VARIANTS["llama"][0] | {"num_hidden_layers": 3}
    new = checkpoints.build_from("LlamaConfig", shape, tmp_path, seed="new")
    llm = make_llm(new, **PLAIN, **drafts_of(folder))
    llm.generate(prompts(), greedy(3), use_tqdm=False)
    before = llm.stats()
    llm.sleep(level=2)
    llm.update_weights(str(llama))
    llm.wake_up()
    counts = check_drafts(llm, head, target)
    llm.generate(prompts(), greedy(), use_tqdm=False)
    stats = llm.stats()
    assert sum(counts) == stats.num_draft_tokens - before.num_draft_tokens
    assert stats.num_accepted_tokens - before.num_accepted_tokens > sum(counts) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "method", "sections"),
    [
        # It adds more of a picture to the outputs of its first layers, which the head reads.
        pytest.param("qwen3_vl_config", "eagle3", None, id="one position"),
        pytest.param("qwen2_5_vl_config", "eagle3", [2, 2, 2], id="three positions"),
        pytest.param("qwen2_5_vl_config", "eagle", None, id="the first EAGLE"),
    ],
)
def test_behind_pictures_drafts_are_those_of_torch(config, method, sections, tmp_path):
    """Of a head that has learned nothing, of prompts in chunks that begin within pictures. It reads the tokens in the
    place of pictures, at their rotary positions; without sections of its own the first of three.
    """
    path = picture_models.save(getattr(picture_models, config)(), tmp_path / "model", seed="head")
    picture_models.save_tokenizer(path)
    target = PictureTarget(path, test_pictures.prepared(path), never=test_pictures.NEVER)
    changes: dict = {"hidden_size": 48, "vocab_size": picture_models.VOCAB_SIZE}
    if sections is not None:
        changes["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
    if method == "eagle":
        head = FirstHead(target, bias=True, **changes)
    else:
        head = Head(CONFIG | changes, target.embedding)
    options = drafts_of(head.save(tmp_path / "head"), method=method)
    check_behind_pictures(path, head, target, **options)


def check_behind_pictures(path, head, target: PictureTarget, **options) -> None:
    """All drafts behind the prompts of `test_pictures`, and that answers are those without."""
    params = dataclasses.replace(test_pictures.GREEDY, max_tokens=12)
    expected = test_pictures.answers(test_pictures.make_llm(path), params=params)
    llm = test_pictures.make_llm(path, **options)
    counts = check_drafts(llm, head, target)
    assert test_pictures.answers(llm, params=params) == expected
    assert sum(counts) == llm.stats().num_draft_tokens > 100


def spec_of(path, **options) -> EngineSpec:
    from jaxpage.composition import spec_of_this_machine

    return spec_of_this_machine(EngineConfig(model=str(path), dtype="float32", **options))


def write_config(folder, **changes) -> Path:
    """A head of which only config.json is there."""
    values = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            "is no head of method 'eagle3'",
        ),
        ({"model_type": "qwen2"}, "model_type 'qwen2'. is no head of method"),
        ({"hidden_size": 64}, "hidden states of 64 values, and those of LlamaForCausalLM have 32"),
        ({"target_hidden_size": 64}, "hidden states of 64 values"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]},
            "layers 0, 1, 4 of a model that has layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, "must be different"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "must be a list of integers"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": 3},
            },
            "must be a list of integers",
        ),
        ({"draft_vocab_size": 300}, "draft_vocab_size is 300"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"vocab_size": 4000}, "vocabulary of 4,000 tokens"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
        (
            {
                "hidden_size": 48,
                "target_hidden_size": 32,
                "eagle_config": {"use_aux_hidden_state": False},
            },
            "has a hidden_size of 48 and takes the model's last hidden states, of 32",
        ),
        ({"speculators_config": {}, "speculators_model_type": "mtp"}, "a speculator 'mtp'"),
        (
            {
                "speculators_config": {},
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {"model_type": ["llama"]},
            },
            r"a layer \['llama'\]",
        ),
        ({"eagle_config": [1]}, r"eagle_config must be an object in config.json, got \[1\]"),
        ({"target_hidden_size": "32"}, "target_hidden_size must be an integer.*, got '32'"),
        ({"architectures": [{}]}, r"architectures must be a list of names, got \[{}\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes, message, llama, tmp_path):
    with pytest.raises(ValueError, match=f"the draft model .*{message}"):
        spec_of(llama, **drafts_of(write_config(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["d2t"].__setitem__(-1, 200), "d2t maps a token to 289"),
        (lambda tensors: tensors["d2t"].__setitem__(0, -1), "d2t maps a token to -1"),
        (lambda tensors: tensors["d2t"].__setitem__(1, tensors["d2t"][0] - 1), "maps 2 tokens to"),
        (lambda tensors: tensors.__setitem__("d2t", tensors["d2t"][:-1]), "d2t"),
        (
            lambda tensors: tensors.__setitem__("d2t", np.array(tensors["d2t"][0])),
            r"d2t has shape \(\) in the checkpoint",
        ),
        (
            lambda tensors: tensors.__setitem__("d2t", tensors["d2t"].astype("f4")),
            "d2t is stored as float32",
        ),
        (lambda tensors: tensors.pop("d2t"), "it lacks d2t"),
        (lambda tensors: tensors.pop("fc.weight"), "it lacks model.fc.weight"),
        (lambda tensors: tensors.pop("lm_head.weight"), "it lacks lm_head.weight"),
    ],
)
def test_damaged_weights_are_said_to_be_the_heads(change, message, target, llama, tmp_path):
    Head(CONFIG, target.embedding).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"draft model of speculative_config: .*{message}"):
        make_llm(llama, **PLAIN, **drafts_of(tmp_path))


def test_heads_of_the_first_eagle_that_do_not_fit_are_refused(llama, tmp_path):
    first = {"architectures": ["EagleLlamaForCausalLM"]}
    for changes, message in (
        ({"hidden_size": 64}, "hidden states of 64 values"),
        ({"add_para_norm": True}, "add_para_norm is set"),
        ({"architectures": CONFIG["architectures"]}, "is no head of method 'eagle'"),
    ):
        folder = write_config(tmp_path, **first | changes)
        with pytest.raises(ValueError, match=message):
            spec = spec_of(llama)
            config = dataclasses.replace(spec.config, model=str(folder))
            abstract_head(load_hf_config(str(folder)), config, spec.model.config, "eagle")


def test_a_config_that_is_no_object_is_no_head(tmp_path):
    for text in ('["speculators_config"]', '"speculators_config"', "{", "3"):
        (tmp_path / "config.json").write_text(text)
        assert method_of_head(str(tmp_path)) is None


def test_a_head_is_no_model(llama, tmp_path):
    with pytest.raises(ValueError, match="is an EAGLE head, which only drafts"):
        spec_of(write_config(tmp_path))


def test_the_embedding_is_counted_once(llama, target, tmp_path):
    spec, both = spec_of(llama), spec_of(llama, **drafts_of(write_config(tmp_path)))
    assert "draft_model.model.embed_tokens.weight" not in both.weight_bytes
    assert both.block_bytes == spec.block_bytes * 4 // 3  # one layer beside three
    assert both.step_spec.feature_size == 32 and spec.step_spec.feature_size == 0
    own = Head(CONFIG | OTHERS["its own embedding, of another size"], target.embedding)
    both = spec_of(llama, **drafts_of(own.save(tmp_path)))
    assert both.weight_bytes["draft_model.model.embed_tokens.weight"] == 250 * 48 * 4
