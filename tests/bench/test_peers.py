"""Peers: what goes through the pipe, what happens to a process that is idle, wrong or dead."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpage import tiny
from jaxpage.bench.engines import Options, Peer, Work
from jaxpage.bench.llama import LlamaCpp
from jaxpage.bench.peers import PEERS, PeerProcess
from tests.bench import parts

OPTIONS = Options(max_model_len=64, max_num_seqs=2, enable_prefix_caching=False)
WORK = Work(prompts=[[3, 4, 5]], num_tokens=[2], static_batch=1)


@pytest.fixture
def ask(monkeypatch):
    """A process of one of the peers in `parts`."""

    def process(peer: type[Peer], **options) -> PeerProcess:
        monkeypatch.setitem(PEERS, "fake", peer)
        return PeerProcess("fake", **options)

    return process


def test_an_answer_with_too_few_tokens_is_an_error(ask):
    with ask(parts.Short) as peer:
        with pytest.raises(RuntimeError, match="1 tokens instead of 2"):
            peer.run(WORK)


def test_a_peers_own_error_is_shown_and_so_is_the_status_of_a_dead_one(ask, tmp_path):
    with ask(parts.Broken) as peer:
        with pytest.raises(RuntimeError, match="^ValueError: no such folder as /.*\nTraceback"):
            peer.setup(tmp_path, OPTIONS)
        with pytest.raises(RuntimeError, match="status 7"):
            peer.run(WORK)


def test_a_peer_that_is_not_asked_is_stopped_and_goes_on_when_asked(ask, tmp_path):
    with ask(parts.Quick, threads=1) as peer:
        assert peer.setup(tmp_path, OPTIONS) == {"variable": "7", "processors": "1"}
        for _ in range(2):
            assert peer.run(WORK) == 1.0
            deadline = time.monotonic() + 30
            while state(peer._process.pid) != "T":
                assert time.monotonic() < deadline, "not stopped"
                time.sleep(0.01)
    assert peer._process.returncode == 0


def state(pid: int) -> str:
    """T if all of the process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_the_python_and_the_package_of_a_peer_must_exist(tmp_path):
    with pytest.raises(ValueError, match="/no/python is not an executable Python"):
        PeerProcess("vllm", "/no/python")
    with PeerProcess("llama.cpp") as peer:
        with pytest.raises(ValueError, match=r"'llama_cpp'.*--python llama\.cpp=ENV"):
            peer.setup(tmp_path, OPTIONS)


def test_variants_differ_by_one_option():
    variants = {name: PEERS[name].options for name in PEERS if name.startswith("jaxpage")}
    assert variants == {
        "jaxpage": {},
        "jaxpage-int8": {"quantization": "int8"},
        "jaxpage-strict": {"numerics": "strict"},
        "jaxpage-no-prefix-cache": {"enable_prefix_caching": False},
    }


class FakeLlama:
    """The C library: remembers what was computed; token n + 1 follows token n."""

    def __init__(self):
        self.batches = []
        self.known = {}  # sequence -> tokens

    def llama_memory_clear(self, memory, data):
        self.known.clear()

    def llama_memory_seq_rm(self, memory, sequence, start, end):
        del self.known[sequence][start:]

    def llama_memory_seq_cp(self, memory, source, target, start, end):
        self.known[target] = list(self.known[source])

    def llama_decode(self, context, batch):
        rows = [
            (batch.seq_id[i][0], batch.pos[i], batch.token[i], batch.logits[i])
            for i in range(batch.n_tokens)
        ]
        for sequence, position, token, _ in rows:
            tokens = self.known.setdefault(sequence, [])
            assert position == len(tokens), "no gaps and no repetitions"
            tokens.append(token)
        self.batches.append(rows)
        return 0

    def llama_get_logits(self, context):
        tokens = [token for _, _, token, wanted in self.batches[-1] if wanted]
        values = [float(v == token + 1) for token in tokens for v in range(100)]
        return ctypes.cast((ctypes.c_float * len(values))(*values), ctypes.POINTER(ctypes.c_float))


def fake_llama(**options) -> LlamaCpp:
    peer, size = LlamaCpp(), 2048
    peer.lib, peer.context, peer.memory, peer.vocab_size = FakeLlama(), None, None, 100
    peer.options = dataclasses.replace(OPTIONS, **options)
    peer.batch = SimpleNamespace(
        token=[0] * size,
        pos=[0] * size,
        n_seq_id=[0] * size,
        seq_id=[[0] for _ in range(size)],
        logits=[0] * size,
    )
    return peer


def test_llama_answers_more_requests_than_it_has_sequences():
    peer = fake_llama()
    work = Work(prompts=[[1, 2], [3], [4, 5, 6]], num_tokens=[3, 1, 2], static_batch=1)
    for _ in range(2):  # a second run begins anew
        assert peer.run(work)[1] == 6
        seen = [[(token, bool(wanted)) for *_, token, wanted in b] for b in peer.lib.batches]
        assert seen == [
            [(1, False), (2, True), (3, True)],
            [(3, True), (4, False), (5, False), (6, True)],
            [(4, True), (7, True)],
        ]
        peer.lib.batches.clear()


def test_llama_computes_what_prompts_begin_with_once():
    peer = fake_llama(enable_prefix_caching=True)
    table = list(range(10, 40))
    work = Work(
        prompts=[[*table, 50], [*table, 60], [*table, 70]], num_tokens=[2, 1, 1], static_batch=1
    )
    assert peer.run(work)[1] == 4
    shared, *steps = [[token for _, _, token, _ in rows] for rows in peer.lib.batches]
    assert (shared, steps) == (table, [[50, 60], [51, 70]])


def test_llama_takes_long_prompts_in_pieces():
    peer = fake_llama(max_model_len=4096)
    assert peer.run(Work(prompts=[[7] * 3000, [8]], num_tokens=[2, 1], static_batch=1))[1] == 3
    assert [len(rows) for rows in peer.lib.batches] == [2048, 953, 1]


@pytest.mark.slow
def test_jaxpage_is_a_peer(ask, tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "tiny", tiny.TINY_CONFIG)
    with ask(parts.Eager) as peer:
        assert peer.setup(folder, OPTIONS)["jax"].startswith("0.")
        assert peer.run(Work(prompts=[[3, 4], [5]], num_tokens=[1, 9], static_batch=1)) > 0
