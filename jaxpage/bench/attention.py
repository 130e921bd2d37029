"""How fast attention is on this device: decoding in bytes, prefill in operations per second, interleaved with peers."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax

from jaxpage.bench import attention_peers, device_time, oracle
from jaxpage.bench.attention_peers import TRITON, Inputs, Peer, Work
from jaxpage.bench.results import Bar, Context, Result, error_summary, failed, measured, missing
from jaxpage.bench.subprocess_rpc import RemoteObject

TORCH = "torch SDPA"
CALLS = 8  # of attention per launch
POOLS = 2  # each larger than any cache
SHARE = {True: Bar(">=", 0.85), False: Bar(">=", 0.6)}  # of bandwidth; of the matrix product rate
SLOW = 0.5  # seconds that one peer may take while the others wait
THREADS = 8  # to compile with
HEADS = ((16, 2), (32, 8))
FASTER = Bar(">=", 1.0)  # for decoding; prefill is compared with the matrix product rate only
RIGHT = Bar("<=", 1e-2)
MANY = 32  # rows from which on the bar for bandwidth applies
BLOCK_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}  # the engine's defaults


def decode(context: Context) -> Iterator[Result]:
    """64 rows of 4,096 tokens, each with one query."""
    yield from _all(context, _by_heads([_work(context, 64, 4096, 1, *heads) for heads in HEADS]))


def prefill(context: Context) -> Iterator[Result]:
    """4 prompts of 2,048 tokens, causal."""
    yield from _all(context, _by_heads([_work(context, 4, 2048, 2048, *heads) for heads in HEADS]))


def _by_heads(works: list[Work]) -> dict[str, Work]:
    return {f"{work.num_heads}/{work.num_kv_heads} heads": work for work in works}


def long(context: Context) -> Iterator[Result]:
    """Long contexts and quantised pools, of 32 heads over 8 KV heads. Bars are for bfloat16 and many rows."""
    works = {
        "1 x 131,072": _work(context, 1, 131072, 1),
        "64 x 32,768": _work(context, 64, 32768, 1),
        "100 queries on 32,768": _work(context, 1, 32768, 100),
        "64 x 4,096, int8": _work(context, 64, 4096, 1, format="int8"),
        "64 x 4,096, int4": _work(context, 64, 4096, 1, format="int4"),
    }
    yield from _all(context, works, long=True)


def _work(
    context: Context,
    batch: int,
    length: int,
    query_len: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    format: str | None = None,
) -> Work:
    head_dim, is_prompt = 128, query_len == length
    if context.tiny:
        num_heads, num_kv_heads, head_dim = 4, 2, 32
        batch, length = min(batch, 2), 64
        query_len = length if is_prompt else min(query_len, 9)
    return Work(
        batch=batch,
        length=length,
        query_len=query_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE[jax.devices()[0].platform],
        format=format,
    )


def _all(context: Context, works: dict[str, Work], *, long: bool = False) -> Iterator[Result]:
    with RemoteObject("jaxpage.bench.torch_attention:Attention") as torch:
        for name, work in works.items():
            yield from Comparison(name, work, context, torch, long=long).results()


class Launch:
    """CALLS calls of a peer's attention, each on the previous one's result, in one program, compiled when created."""

    def __init__(self, peer: Peer, given: Inputs, kv: list[Any] | None = None) -> None:
        """kv: `peer.kv(given)`, if other launches have it already, too."""
        attend = jax.jit(peer.attend)  # traced and lowered once for all calls

        def run(q: Any, kv: Any, rows: Any) -> Any:
            kv = list(kv)
            for i in range(CALLS):
                q, kv[i % len(kv)] = attend(q, kv[i % len(kv)], *rows)
            return q, kv if peer.writes else None

        # A peer that writes needs its own pools; the others share theirs.
        jitted = jax.jit(run, donate_argnums=(0, 1) if peer.writes else ())
        kv, rows = kv or peer.kv(given), given.rows()
        compiled = jitted.lower(given.q, kv, rows).compile()
        self.name = peer.name
        self._launch = lambda carry: compiled(carry[0], carry[1] if peer.writes else kv, rows)
        self._carry = (given.q.copy(), kv) if peer.writes else (given.q, None)

    def seconds(self, *, tiny: bool) -> float:
        """Median seconds of one call."""
        options = {"at_least": 0.0 if tiny else 0.02, "samples": 1 if tiny else 5}
        taken, self._carry = device_time.seconds(self._launch, self._carry, within=SLOW, **options)
        return statistics.median(taken) / CALLS


class Comparison:
    """The same work on every implementation that supports it, interleaved."""

    def __init__(
        self, name: str, work: Work, context: Context, torch: RemoteObject, *, long: bool
    ) -> None:
        self.name, self.work, self.context, self.torch = name, work, context, torch
        self.device, self.long = jax.devices()[0], long
        self.given = attention_peers.inputs(work, num_pools=POOLS)
        self.faster = FASTER if work.decode and not long else None
        self.share = SHARE[work.decode]
        if long and (work.batch < MANY or work.format is not None):
            self.share = None
        self.limit = "bandwidth" if work.decode else "matrix product rate"
        self.peers, self.absent = attention_peers.peers(work, self.device.platform)
        if long:  # it needs a copy of the pool
            self.peers = [each for each in self.peers if TRITON not in each[0].name]
            self.absent.setdefault(TRITON, "see `decode`: its copy of a large pool may not fit")

    def results(self) -> Iterator[Result]:
        """The error of ours, the time of each, our share of the peak rate, and our speed relative to the best."""
        whats = ("relative error", f"share of {self.limit}", "speed to the best")
        wrong, share, faster = (f"{self.name}, {what}" for what in whats)
        bar = self.share
        _, absent = attention_peers.kernels_of(self.device)
        if reason := absent.get(self.device.platform):  # a GPU that the kernel does not support
            yield missing(share, "", reason, bar)
            yield missing(faster, "x", reason, self.faster)
            return
        ours, *others = self.peers
        due = {wrong: RIGHT, share: bar, faster: self.faster}
        with ThreadPoolExecutor(1) as background:
            torch_is_ready = background.submit(self._set_up_torch)  # while jax compiles
            try:
                yield self._error(wrong, ours[0], others)
                due.pop(wrong)
                launch = Launch(ours[0], self.given)
                launch.seconds(tiny=True)
            except Exception as problem:  # any error of a compiler or a device
                traceback.print_exc()
                for name, missed in due.items():
                    yield failed(name, error_summary(problem), missed)
                return
            compiled = self._compile(others)
            torch_is_ready.result()
        times = self._rounds([launch, *self._fastest(compiled)])
        for name, reason in self.absent.items():
            yield missing(f"{self.name}, {name}", "us", reason)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        for name, taken in times.items():
            details = {"best": min(taken) * 1e6, "samples": [t * 1e6 for t in taken]}
            yield measured(f"{self.name}, {name}", medians[name] * 1e6, "us", **details)
        yield self._share(share, medians[launch.name], bar)
        yield self._against_best(faster, medians.pop(launch.name), medians)

    def _error(self, name: str, ours: Peer, others: list[list[Peer]]) -> Result:
        """Compared with float64, or for long contexts, where that takes minutes, with plain XLA."""
        reference = others[0][0] if self.long and others else None
        if reference and ours.writes and self.work.format:
            return missing(
                name, "", "it quantises what it writes, which plain XLA does not see", RIGHT
            )
        return measured(name, self.error(ours, reference), "", RIGHT)

    def error(self, peer: Peer, reference: Peer | None = None) -> float:
        """The peer's error in the first pool: of the worst of every eighth row, and of the end of the last row; with a
        `reference`, which takes a pool such as ours, of the worst of all rows.
        """
        work, given = self.work, self.given
        out, kv = jax.jit(peer.attend)(given.q, peer.kv(given)[0], *given.rows())
        pool = kv.reshape(given.pools[0].shape) if peer.writes else given.pools[0]
        if reference is not None:
            want, _ = jax.jit(reference.attend)(given.q, pool, *given.rows())
            by_row = oracle.float64(want).reshape(work.batch, work.query_len, *want.shape[1:])
            return oracle.worst_row(out, given.query_starts, dict(enumerate(by_row)))
        arguments = {
            "q": given.q,
            "pool": pool,
            "block_table": given.table,
            "kv_lens": given.kv_lens,
            "query_starts": given.query_starts,
            "scale": work.scale,
        }
        expected = oracle.attention(arguments, range(0, work.batch, 8))
        expected |= oracle.attention(arguments, (work.batch - 1,), queries=16)
        return oracle.worst_row(out, given.query_starts, expected)

    def _compile(self, peers: list[list[Peer]]) -> dict[str, list[Launch]]:
        """By peer the variants that compile, in parallel, which takes most of the time. They share keys and values."""
        compiling: dict[str, list[Future[Launch]]] = {}
        with ThreadPoolExecutor(THREADS) as pool:
            for name, variants in ((each[0].name, each) for each in peers):
                try:
                    kv = None if variants[0].writes else variants[0].kv(self.given)
                except Exception as problem:  # too little memory
                    self._leave_out(name, problem)
                    continue
                compiling[name] = [pool.submit(Launch, peer, self.given, kv) for peer in variants]
        found: dict[str, list[Launch]] = {}
        for name, futures in compiling.items():
            for future in futures:
                try:
                    found.setdefault(name, []).append(future.result())
                except Exception as problem:  # any error of a compiler
                    self._leave_out(name, problem)
        return found

    def _fastest(self, compiled: dict[str, list[Launch]]) -> list[Launch]:
        """The fastest variant of each peer that runs."""
        fastest = []
        for name, launches in compiled.items():
            times: dict[float, Launch] = {}
            for launch in launches:
                try:
                    times[launch.seconds(tiny=True)] = launch
                except Exception as problem:  # any error of a device
                    self._leave_out(name, problem)
            if times:
                self.absent.pop(name, None)
                fastest.append(times[min(times)])
        return fastest

    def _leave_out(self, name: str, problem: Exception) -> None:
        traceback.print_exception(problem)
        self.absent[name] = error_summary(problem)

    def _set_up_torch(self) -> None:
        """Torch is absent unless it finds the same device as jax, and reads such a pool."""
        platform = self.device.platform
        if self.work.format is not None:
            self.absent[TORCH] = self.absent.get(attention_peers.CUDNN, "it reads bfloat16")
        if platform == "tpu":
            self.absent[TORCH] = "it has no TPU here"
        versions = self._ask_torch("setup", asdict(self.work), self.context.tiny)
        if versions and (versions["device"] == "cuda") != (platform == "gpu"):
            self.absent[TORCH] = f"torch finds {versions['device']}, jax {platform}"

    def _ask_torch(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Empty once torch is absent, which it also is after an error."""
        if TORCH in self.absent:
            return {}
        try:
            return self.torch.ask(method, *arguments, timeout=120)
        except (RuntimeError, TimeoutError) as error:
            print(error, file=sys.stderr)
            self.absent[TORCH] = error_summary(error)
            return {}

    def _rounds(self, launches: list[Launch]) -> dict[str, list[float]]:
        """Seconds of one call by name, for each round; every round has all of them."""
        times: dict[str, list[float]] = {launch.name: [] for launch in launches}
        for _ in range(1 if self.context.tiny else 3):
            for launch in launches:
                times[launch.name].append(launch.seconds(tiny=self.context.tiny))
            for name, seconds in self._ask_torch("seconds").items():
                if isinstance(seconds, str):  # why it cannot
                    self.absent[name] = seconds
                else:
                    times.setdefault(name, []).append(seconds)
        return times

    def _share(self, name: str, seconds: float, bar: Bar | None) -> Result:
        decode = self.work.decode
        peak = self.context.bandwidth if decode else self.context.matmul
        if peak is None:
            return missing(name, "", f"the {self.limit} was not measured", bar)
        amount = self.work.kv_bytes if decode else self.work.flops
        details = {("bytes" if decode else "flops"): amount, "peak": peak}
        kind = self.device.device_kind
        return measured(name, amount / seconds / peak, "", bar, device=kind, **details)

    def _against_best(self, name: str, ours: float, others: dict[str, float]) -> Result:
        if not others:
            return missing(name, "x", "there is nothing to compare with", self.faster)
        best, kind = min(others, key=lambda peer: others[peer]), self.device.device_kind
        return measured(name, others[best] / ours, "x", self.faster, device=kind, best=best)
