"""Strict numerics on a real device: bits that depend on nothing, and that the trainer computes too."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.runner.strict import GPU_FLAG
from tests.rl.modules import make_module, make_sampler, write_config

PROMPTS = [[5, 6, 7, *range(20, 60)], [3, 4, 5], [9], [5, 6, 7, *range(20, 40)]]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_on_a_gpu(dtype, tmp_path):
    """In a process of its own, since XLA reads its flags once."""
    environment = os.environ | {"XLA_FLAGS": GPU_FLAG, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.rl.test_strict_on_devices", dtype]
    command.append(str(write_config(tmp_path)))
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_on_a_tpu(dtype, tmp_path):
    check(dtype, write_config(tmp_path))


def check(dtype, path):
    module = make_module(path, dtype=dtype)
    params = [dataclasses.replace(PARAMS, seed=i) for i in range(len(PROMPTS))]
    alone, found = [], []
    for options in ({}, {"max_num_seqs": 2, "max_num_batched_tokens": 9}):
        sampler = make_sampler(module, path, numerics="strict", **options)
        try:
            rollout = sampler.generate(PROMPTS, PARAMS, n=2, seed=1)
            assert sampler.check_parity(rollout).bitwise_equal
            found.append(rollout.logprobs)
            each = [
                sampler.generate([prompt], own, n=1).logprobs
                for prompt, own in zip(PROMPTS, params, strict=True)
            ]
            alone.append(np.concatenate(each))
        finally:
            sampler.shutdown()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(alone[0], alone[1])


if __name__ == "__main__":
    check(sys.argv[1], Path(sys.argv[2]))
