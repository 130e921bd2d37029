"""Engines whose models have a recurrent state: what users do with them besides generating, and slots that are used
again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxpage import AsyncLLM, SamplingParams
from jaxpage.replay import replay
from jaxpage.rl import load_module, logprobs
from jaxpage.weights.save import save
from tests import checkpoints, dense_families, mixtures
from tests.end_to_end import test_late_masks as late_masks
from tests.end_to_end.test_parity import log_softmax, prompts_of, torch_logits_of
from tests.end_to_end.test_speculation import LOOKUP
from tests.few_programs import few_programs
from tests.rl.test_rollout import completion, make_rollout, output

pytestmark = pytest.mark.slow

PROMPTS = prompts_of((30, 7, 1, 20))
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
BUILD = {
    "qwen3_5": dense_families.build,
    "qwen3_5_moe": mixtures.build,
    "qwen3_next": mixtures.build,
    "granite_hybrid": dense_families.build,
    "granite_hybrid_moe": mixtures.build,
    "nemotron_h": dense_families.build,
    "nemotron_h_moe": mixtures.build,
    "lfm2": dense_families.build,
    "lfm2_moe": mixtures.build,
    "falcon_h1": dense_families.build,
}


def make_llm(path, **options):
    return checkpoints.make_llm(path, **({"enforce_eager": True} | options))


def answers(llm, prompts=PROMPTS) -> list[checkpoints.Answer]:
    return checkpoints.answers(llm, prompts, PARAMS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return BUILD["qwen3_5"]("qwen3_5", 0, tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def expected(path) -> list[checkpoints.Answer]:
    """Of a fresh engine, which are those of transformers."""
    found = answers(make_llm(path))
    tokens = [each for each, _ in found]
    for (ours, _), logits in zip(found, torch_logits_of(path, PROMPTS, tokens), strict=True):
        assert ours == logits.argmax(axis=-1).tolist()
    return found


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_what_is_saved_is_what_was_loaded(family, format, tmp_path):
    path = BUILD[family](family, 0, tmp_path / "model")
    saved = save(
        load_module(str(path), dtype="float32"), tmp_path / "saved", files=path, format=format
    )
    checkpoints.assert_same_answers(answers(make_llm(saved)), answers(make_llm(path)), atol=1e-5)
    if format == "safetensors":
        tokens = np.array([PROMPTS[0]])
        logits, same = (checkpoints.torch_logits(each, tokens) for each in (path, saved))
        np.testing.assert_array_equal(logits, same)


@pytest.mark.parametrize("family", BUILD)
def test_weights_are_replaced_and_sleep(family, tmp_path):
    build = BUILD[family]
    path, other = build(family, 0, tmp_path / "model"), build(family, 0, tmp_path / "other")
    rng, file = np.random.default_rng(0), other / "model.safetensors"
    changed = {name: x * rng.uniform(0.7, 1.3, x.shape) for name, x in load_file(file).items()}
    changed = {name: x.astype(np.float32) for name, x in changed.items()}
    save_file(changed, file, metadata={"format": "pt"})
    llm, new = make_llm(path), answers(make_llm(other))
    old = answers(llm)
    assert [tokens for tokens, _ in old] != [tokens for tokens, _ in new]
    llm.update_weights(str(other))
    checkpoints.assert_same_answers(answers(llm), new, atol=1e-4)
    llm.sleep()
    llm.wake_up()
    checkpoints.assert_same_answers(answers(llm), new, atol=1e-4)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.update_weights(str(path))
    llm.wake_up()
    checkpoints.assert_same_answers(answers(llm), old, atol=1e-4)


def test_names_of_checkpoints_with_pictures_and_further_predictors(path, expected, tmp_path):
    folder = Path(shutil.copytree(path, tmp_path / "copy"))
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in weights.items()
    }
    renamed["mtp.fc.weight"] = np.zeros((4, 4), np.float32)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoints.assert_same_answers(answers(make_llm(folder)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "option"), [("qwen3_5", "linear_conv_kernel_dim"), ("lfm2", "conv_L_cache")]
)
def test_a_convolution_with_one_tap_keeps_no_inputs(family, option, tmp_path):
    """Of LFM2 the state is empty then."""
    path = BUILD[family](family, 0, tmp_path, **{option: 1})
    found = answers(make_llm(path))
    for (tokens, _), prompt in zip(found, PROMPTS, strict=True):
        (logits,) = torch_logits_of(path, [prompt], [tokens])
        assert tokens == logits.argmax(axis=-1).tolist()


def test_slots_of_aborted_requests_are_as_new(path, expected):
    llm = make_llm(path, max_num_seqs=2)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), {"prompt_token_ids": prompt}, long)
    for aborted in (["0", "2"], ["1", "3"]):
        for _ in range(3):
            llm.step()
        llm.abort_request(aborted)
    checkpoints.assert_same_answers(answers(llm), expected, atol=1e-4)
    got = answers(llm, PROMPTS[::-1])
    checkpoints.assert_same_answers(got, expected[::-1], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "devices"),
    [("qwen3_5", 1), ("qwen3_5", 2), ("granite_hybrid", 1), ("lfm2", 2), ("falcon_h1", 2)],
)
def test_prompts_begin_with_states_in_the_prefix_cache(family, devices, tmp_path):
    path = BUILD[family](family, 0, tmp_path)
    sizes = {"max_model_len": 512, "block_size": 16, "tensor_parallel_size": devices}
    start, end, other = prompts_of((260, 230, 20))
    # The first leaves a state after 480 tokens, the third one where they differ.
    prompts = [start + end, start + end, start + other, start + end[::-1], start + other[::-1]]
    cached = [0, 480, 0, 256, 256]
    without = make_llm(path, enable_prefix_caching=False, **sizes)
    expected = answers(without, prompts)
    llm = make_llm(path, **sizes)
    for prompt, wanted, number in zip(prompts, expected, cached, strict=True):
        hits = llm.stats().prefix_cache_hits
        checkpoints.assert_same_answers(answers(llm, [prompt]), [wanted], atol=1e-4)
        assert llm.stats().prefix_cache_hits - hits == number


@pytest.mark.parametrize(
    "options",
    [{}, {"num_gpu_blocks_override": 18}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 3}],
    ids=["overlap", "preempted", "chunks-of-7", "few-slots"],
)
def test_masks_that_come_late_change_no_token(options, path):
    """A row that waits for its mask takes no step, and its state none either."""
    plain = make_llm(path, async_scheduling=False, decode_steps=1)
    free, masked = (late_masks.answers(plain, [delay] * 6) for delay in (None, 0))
    delays = [0, 1, None, 3, None, 9]
    llm = checkpoints.make_llm(path, **options)
    got = late_masks.answers(llm, delays)
    for index, delay in enumerate(delays):
        assert got[index] == (free if delay is None else masked)[index]
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0


def test_prompts_may_be_embeddings(path, expected):
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    prompts = [{"prompt_embeds": table[np.array(prompt)]} for prompt in PROMPTS]
    got = answers(make_llm(path, enable_prompt_embeds=True), prompts)
    checkpoints.assert_same_answers(got, expected, atol=1e-4)


def test_logprobs_of_a_prompt(path):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (found,) = make_llm(path).generate([PROMPTS[0]], params, use_tqdm=False)
    wanted = log_softmax(checkpoints.torch_logits(path, np.array([PROMPTS[0]]))[0])
    pairs = zip(found.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
    got = [row[token].logprob for row, token in pairs]
    np.testing.assert_allclose(got, wanted[np.arange(29), PROMPTS[0][1:]], atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"speculative_config": LOOKUP}], ids=["plain", "with drafts"]
)
def test_recorded_calls_give_the_same_bits(options, path, tmp_path):
    file = tmp_path / "run.calls"
    llm = make_llm(path, record_calls=str(file), **options)
    answers(llm, [[*prompt, *prompt] for prompt in PROMPTS])
    assert (llm.stats().num_draft_tokens > 0) == bool(options)
    del llm
    with few_programs(), file.open("rb") as recording:
        found = replay(recording)
    assert found.num_results > 0 and found.different == ()


def test_a_replay_has_the_recorded_number_of_cached_states(path, tmp_path, monkeypatch):
    """Here the device that replays has room for one state."""
    file = tmp_path / "calls"
    prompts = [*prompts_of((300, 310)), *prompts_of((300, 310))]
    with few_programs():
        llm = checkpoints.make_llm(path, max_model_len=512, block_size=16, record_calls=str(file))
        for prompt in prompts:
            answers(llm, [prompt])
        assert llm.stats().prefix_cache_hits == 288 + 304
        del llm
        monkeypatch.setattr("jaxpage.engine_spec.total_ram", lambda: 1)
        with file.open("rb") as recording:
            found = replay(recording)
    assert found.num_results > 0 and found.different == ()


def test_logprobs_of_rollouts_do_not_see_padding(path):
    rng = np.random.default_rng(0)
    long, some = rng.integers(3, 200, 70).tolist(), rng.integers(3, 200, 9).tolist()
    outputs = [
        output(long, completion(0, some), completion(1, [5])),
        output([6], completion(0, [3, 2])),
    ]
    options = {"pad_id": 0, "temperature": 1.0, "logprobs_mode": "raw", "version_of": lambda _: 0}
    rollout = make_rollout(outputs, [1, 2], **options)
    module, jitted = load_module(str(path), dtype="float32"), nnx.jit(logprobs)
    wanted = []
    for prompt, tokens in ((long, some), (long, [5]), ([6], [3, 2])):
        whole = [*prompt, *tokens]
        lp = log_softmax(checkpoints.torch_logits(path, np.array([whole]))[0] / 0.7)
        wanted += [lp[i - 1, whole[i]] for i in range(len(prompt), len(whole))]
    for batch in (rollout.to_padded(side="right"), rollout.to_padded(90, 12, pad_id=3)):
        found = np.asarray(jitted(module, batch, 0.7))[batch.completion_mask]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_tasks_that_come_and_go(path, expected):
    async def all_answers() -> list[list[int]]:
        with few_programs():
            llm = AsyncLLM(
                str(path), skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=4,
                max_num_batched_tokens=64, enforce_eager=True,
            )  # fmt: skip

        async def one(number: int) -> list[int]:
            tokens: list[int] = []
            prompt = {"prompt_token_ids": PROMPTS[number % 4]}
            async for each in llm.generate(prompt, PARAMS, request_id=str(number)):
                tokens = list(each.outputs[0].token_ids)
                if number % 5 == 4:  # it leaves
                    break
            return tokens

        found = await asyncio.gather(*map(one, range(20)))
        llm.shutdown()
        return found

    for number, tokens in enumerate(asyncio.run(all_answers())):
        if number % 5 < 4:
            assert tokens == expected[number % 4][0]


def test_the_config_may_have_no_kinds_of_layers(path, expected, tmp_path):
    """Every fourth layer has attention."""
    folder = Path(shutil.copytree(path, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoints.assert_same_answers(answers(make_llm(folder)), expected, atol=1e-6)
