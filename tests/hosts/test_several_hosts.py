"""An engine of several processes of this machine answers as one process does, and ends clearly if one is lost.

Collectives between processes cost milliseconds on a CPU, however small, so most runs here are short.
"""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest

from tests import checkpoints
from tests.hosts.cluster import cluster, run
from tests.hosts.host import Job

LONGEST_WAIT = 15  # seconds until the other processes have ended


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def few_batches(model):
    """Of an engine with two devices of one process."""
    return run(Job(model=model, batches=3, options={"tensor_parallel_size": 2}), 1, num_devices=2)


def assert_same(got, expected):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        for (tokens, logprob), (same, other) in zip(
            ours["answers"], theirs["answers"], strict=True
        ):
            assert tokens == same
            if other is not None:
                np.testing.assert_allclose(logprob, other, atol=1e-3)


def answered(said):
    return [line for line in said if "answers" in line]


PRESSURE = {"num_gpu_blocks_override": 24, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "num_requests"),
    [
        pytest.param(2, 1, 24, marks=pytest.mark.slow),
        pytest.param(2, 1, 200, marks=pytest.mark.deep),
        pytest.param(2, 2, 24, marks=pytest.mark.deep),
        pytest.param(4, 1, 24, marks=pytest.mark.deep),
    ],
)
def test_mixed_requests_under_pressure(model, num_hosts, num_devices, num_requests):
    """Preempted and swapped, with penalties, logprobs, n > 1, embeddings; and beams."""
    total = num_hosts * num_devices
    job = Job(model=model, mixed_requests=num_requests, options=PRESSURE)
    alone = Job(
        model=model, mixed_requests=num_requests, options=PRESSURE | {"tensor_parallel_size": total}
    )
    expected = run(alone, 1, num_devices=total)
    said = run(job, num_hosts, num_devices=num_devices, seconds=3000)
    assert_same(answered(said), answered(expected))
    for name in ("preemptions", "swapped in"):
        assert said[-1][name] == expected[-1][name] > 0


def check_loss(model, few_batches, *, victim, signal_number, lines, pause):
    """One of two hosts gets a signal; the other one ends soon, and says why."""
    with cluster(Job(model=model, batches=200)) as hosts:
        hosts[0].wait_for_lines(lines)
        time.sleep(pause)
        hosts[victim].process.send_signal(signal_number)
        other = hosts[1 - victim]
        assert other.exit_code(LONGEST_WAIT) != 0
        assert f"host {victim} is lost" in other.errors()
        if victim == 1:
            assert f"host {victim} is lost" in other.said()[-1]["error"]
        found = answered(hosts[0].said())[:3]
        assert_same(found, answered(few_batches)[: len(found)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "signal_number"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.deep),
    ],
)
def test_a_lost_host_ends_the_others(model, few_batches, victim, signal_number):
    check_loss(model, few_batches, victim=victim, signal_number=signal_number, lines=2, pause=0.1)


@pytest.mark.deep
@pytest.mark.parametrize("number", range(20))
def test_a_host_is_killed_at_a_random_time(model, few_batches, number):
    chance = random.Random(number)
    check_loss(
        model,
        few_batches,
        victim=number % 2,
        signal_number=signal.SIGKILL,
        lines=chance.randint(1, 4),
        pause=chance.uniform(0, 2),
    )


@pytest.mark.slow
def test_other_options_are_told_on_both_sides(model):
    job = Job(model=model, batches=1)
    with cluster(job, own={1: {"seed": 7}}) as hosts:
        for host in hosts:
            assert host.exit_code(120) == 1
            assert "seed is" in host.errors() and "7" in host.errors()


@pytest.mark.slow
def test_another_secret_is_told_on_both_sides(model):
    with cluster(Job(model=model), secrets=("one", "another")) as hosts:
        for host in hosts:
            assert host.exit_code(120) == 1
            assert "JAXPAGE_HOSTS_SECRET" in host.errors()


@pytest.mark.slow
def test_two_processes_answer_as_one_does_and_an_equal_start_finds_their_programs(
    model, few_batches, tmp_path
):
    job = Job(model=model, batches=3, options={"compilation_cache_dir": str(tmp_path)})
    # What comes from jax's own cache is not stored.
    first, second = (run(job, 2, JAX_ENABLE_COMPILATION_CACHE="false") for _ in range(2))
    for said in (first, second):
        assert_same(answered(said), answered(few_batches))
    assert second[-1]["origins"] == ["stored"]
