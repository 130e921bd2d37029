"""Recorded calls do again what they did: from a file, and sent to another process as they come."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save, save_file

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.build import _SIZES, _recording_header
from jaxpage.cli import main
from jaxpage.config import EngineConfig
from jaxpage.replay import _frames_of_recording, replay
from jaxpage.runner.recording import CallRecorder, frame
from tests import checkpoints
from tests.checkpoints import make_llm
from tests.few_programs import few_programs

# A pool of a few requests: sequences are preempted, swapped, and found again in the prefix cache.
OPTIONS = {
    "num_gpu_blocks_override": 40,
    "swap_space": 0.001,
    "preemption_mode": "swap",
    "enable_prompt_embeds": True,
    "max_logprobs": 8,
    "decode_steps": 4,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("model"))


def work(llm, num_requests):
    """Requests of every kind: greedy, random, with penalties, constraints, logprobs, n > 1, embeddings; and beams."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, checkpoints.VOCAB_SIZE, 16).tolist()
    prompts, params = [], []
    for i in range(num_requests):
        own = rng.integers(3, checkpoints.VOCAB_SIZE, int(rng.integers(1, 50))).tolist()
        prompt = {"prompt_token_ids": start + own if i % 3 else own}
        if i % 7 == 3:
            prompt = {"prompt_embeds": rng.standard_normal((20, 32)).astype(np.float32)}
        options = {"max_tokens": int(rng.integers(1, 30)), "temperature": [0, 1.0][i % 2]}
        if i % 5 == 1:
            options |= {"n": 2, "temperature": 0.9, "top_p": 0.9}
        if i % 4 == 2:
            options |= {"logit_bias": {5: 2.0}, "repetition_penalty": 1.2, "min_tokens": 1}
        if i % 6 == 0:
            options |= {"logprobs": 4}
        prompts.append(prompt)
        params.append(SamplingParams(**options))
    half = num_requests // 2
    outputs = llm.generate(prompts[:half], params[:half], use_tqdm=False)
    llm.beam_search([{"prompt_token_ids": start}], BeamSearchParams(beam_width=4, max_tokens=8))
    return outputs + llm.generate(prompts[half:], params[half:], use_tqdm=False)


def check_pressure(stats):
    assert stats.num_preemptions > 0 and stats.num_blocks_swapped_in > 0
    assert stats.prefix_cache_hits > 0 and stats.num_block_copies > 0


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(60, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.deep)],
)
def test_mixed_requests_are_replayed_bit_for_bit(num_requests, path, tmp_path, capsys):
    """And by another process, to which the calls are sent over a socket while they are made."""
    file = tmp_path / "calls"
    llm = checkpoints.make_llm(path, all_programs=True, **OPTIONS, record_calls=str(file))
    llm.wait_until_warm()  # the other process finds the programs, and compiles none at the same time
    header = _recording_header(
        EngineConfig.from_options(model=str(path), **llm_options(file)),
        MagicMock(config=llm.config, num_devices=1, num_cached_states=0),
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.follower", str(server.getsockname()[1])],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
    with connection, connection.makefile("wb") as stream:
        runner = llm._engine.runner
        runner.recorder = Both(runner.recorder, CallRecorder(stream, header))
        work(llm, num_requests)
        check_pressure(llm.stats())
        runner.recorder.close()
    said, _ = follower.communicate(timeout=600)
    followed = json.loads(said.splitlines()[-1])
    assert followed["num_results"] == llm.stats().num_steps and followed["different"] == []
    assert main(["replay", str(file), "--model", str(path)]) == 0
    assert "all results are the same, bit for bit" in capsys.readouterr().out


def llm_options(file):
    small = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 8}
    small |= {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return small | OPTIONS | {"record_calls": str(file)}


def test_a_recording_says_whether_its_programs_have_thinking_budgets():
    markers = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    options = EngineConfig.from_options(model="m", reasoning_config=markers)
    config = MagicMock(**dict.fromkeys(_SIZES, 64), model="m")
    header = json.loads(
        json.dumps(
            _recording_header(options, MagicMock(config=config, num_devices=1, num_cached_states=0))
        )
    )
    assert (
        EngineConfig.from_options(**header["options"]).reasoning_config == options.reasoning_config
    )


class Both:
    """Two recorders of the same calls."""

    def __init__(self, *recorders):
        self.recorders = recorders

    def __getattr__(self, name):
        def record(*args):
            for recorder in self.recorders:
                getattr(recorder, name)(*args)

        return record


@pytest.mark.slow
def test_a_recording_is_replayed(path, tmp_path):
    file = tmp_path / "calls"
    llm = checkpoints.make_llm(path, all_programs=True, **OPTIONS, record_calls=file)
    work(llm, 12)
    num_steps = llm.stats().num_steps
    assert not file.exists() and Path(f"{file}.partial").exists()
    del llm
    assert file.exists() and not Path(f"{file}.partial").exists()
    with file.open("rb") as stream:
        found = replay(stream)
    assert found.num_results == num_steps and found.different == () and not found.weights_changed


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tensor_parallel_size", "mesh"])
def test_as_many_devices_replay_it_as_recorded_it(where, path, tmp_path):
    file = tmp_path / "calls"
    devices = 2 if where == "tensor_parallel_size" else Mesh(np.array(jax.devices()[:2]), ("x",))
    with few_programs():
        options = {where: devices, "enforce_eager": True}
        llm = make_llm(path, **options, record_calls=str(file))
        params = SamplingParams(max_tokens=9, temperature=0.8, seed=1)
        llm.generate([[3, 4, 5], [6, 7]], params, use_tqdm=False)
        del llm
        with file.open("rb") as stream:
            found = replay(stream)
    assert found.num_results > 0 and found.different == ()


@pytest.mark.slow
def test_what_differs_is_told(path, tmp_path, capsys):
    """Another checkpoint samples other tokens; the first difference is named, and the exit code says so."""
    file, other = tmp_path / "calls", tmp_path / "other"
    options = OPTIONS | {"enforce_eager": True, "record_calls": str(file)}
    llm = checkpoints.make_llm(path, all_programs=True, **options)
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)
    del llm
    shutil.copytree(path, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= -1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["replay", str(file), "--model", str(other)]) == 1
    assert "results differ, the first ones of launches 0" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["replay", str(file)]) == 1
    said = capsys.readouterr().out
    assert "the recording is incomplete" in said and "the compared results are the same" in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing of the kind" * 9,
        frame("calls", [], programs=[]),
        frame("header", []),
        save({"weight": np.zeros(3, np.float32)}),
    ],
    ids=["empty", "text", "calls first", "no options", "weights"],
)
def test_another_file_is_refused_with_its_name(content, tmp_path, capsys):
    file = tmp_path / "calls"
    file.write_bytes(content)
    assert main(["replay", str(file)]) == 2
    assert f"{file} is not a recording; LLM(..., record_calls=FILE)" in capsys.readouterr().err


def test_damage_in_the_middle_is_told(tmp_path):
    file = tmp_path / "calls"
    file.write_bytes(frame("header", [], options={}) + bytes([9, *[0] * 7]) + b"no header")
    with file.open("rb") as stream:
        found = _frames_of_recording(stream)
        assert next(found)[0] == "header"
        with pytest.raises(ValueError, match="calls is damaged after 1 frames: not a frame"):
            next(found)
