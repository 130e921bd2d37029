"""An engine of several processes of this machine answers as one process does, and ends clearly if one is lost.

Collectives between processes cost milliseconds on a CPU, however small, so most runs here are short.
"""

from __future__ import annotations

import functools
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
    """With one layer, which has everything that hosts exchange."""
    folder = tmp_path_factory.mktemp("model")
    return str(checkpoints.build("qwen2", 0, folder, num_hidden_layers=1))


# A pool of a few requests: sequences are preempted and swapped.
PRESSURE = {"num_gpu_blocks_override": 24, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def one_process(model):
    """What an engine says that has two devices of one process."""
    options = PRESSURE | {"tensor_parallel_size": 2}
    job = Job(model=model, mixed_requests=24, batches=3, options=options)
    return run(job, 1, num_devices=2)


@pytest.fixture(scope="module")
def options_of_two(tmp_path_factory):
    """Of two hosts whose programs are stored in a folder of their own."""
    return PRESSURE | {"compilation_cache_dir": str(tmp_path_factory.mktemp("programs"))}


@pytest.fixture(scope="module")
def two_processes(model, options_of_two):
    """What an engine says that has two hosts with a device each."""
    job = Job(model=model, mixed_requests=24, batches=3, options=options_of_two)
    # What comes from jax's own cache is not stored.
    return run(job, 2, JAX_ENABLE_COMPILATION_CACHE="false")


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


def assert_same_under_pressure(said, expected):
    assert_same(answered(said), answered(expected))
    for name in ("preemptions", "swapped in"):
        assert said[-1][name] == expected[-1][name] > 0


@pytest.mark.slow
def test_two_processes_answer_as_one_does(two_processes, one_process):
    """Requests preempted and swapped, with penalties, logprobs, n > 1, embeddings; and beams."""
    assert_same_under_pressure(two_processes, one_process)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "num_requests"), [(2, 1, 200), (2, 2, 24), (4, 1, 200)]
)
def test_mixed_requests_under_pressure(model, num_hosts, num_devices, num_requests):
    total = num_hosts * num_devices
    job = Job(model=model, mixed_requests=num_requests, options=PRESSURE)
    alone = Job(
        model=model, mixed_requests=num_requests, options=PRESSURE | {"tensor_parallel_size": total}
    )
    expected = run(alone, 1, num_devices=total)
    assert_same_under_pressure(run(job, num_hosts, num_devices=num_devices, seconds=3000), expected)


@pytest.fixture
def check_loss(model, options_of_two, two_processes):
    return functools.partial(_check_loss, model, options_of_two, two_processes)


def _check_loss(model, options, before, *, victim, signal_number, lines, pause):
    """Two hosts start as `before`, with its programs. One gets a signal; the other one ends soon, and says why."""
    with cluster(Job(model=model, batches=200, options=options)) as hosts:
        hosts[0].wait_for_lines(lines)
        time.sleep(pause)
        hosts[victim].process.send_signal(signal_number)
        other = hosts[1 - victim]
        assert other.exit_code(LONGEST_WAIT) != 0
        assert f"host {victim} is lost" in other.errors()
        if victim == 1:
            assert f"host {victim} is lost" in other.said()[-1]["error"]
        found = answered(hosts[0].said())[:3]
        assert_same(found, answered(before)[1:][: len(found)])
        assert all(line["origins"] == ["stored"] for line in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "signal_number"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.deep),
    ],
)
def test_a_lost_host_ends_the_others_of_an_engine_with_stored_programs(
    check_loss, victim, signal_number
):
    check_loss(victim=victim, signal_number=signal_number, lines=2, pause=0.1)


@pytest.mark.deep
@pytest.mark.parametrize("number", range(20))
def test_a_host_is_killed_at_a_random_time(check_loss, number):
    chance = random.Random(number)
    check_loss(
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
