"""torch's attention on the same work, in a separate process (`subprocess_rpc`): imports neither jax nor jaxpage.

Causal if every token is a query; a few queries at the end see all keys, which is hardly more work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

CALLS = 8  # of attention per launch


class Attention:
    """torch's attention on contiguous keys and values: `scaled_dot_product_attention` with each backend that supports
    them, and FlexAttention.
    """

    def setup(self, work: dict[str, Any], tiny: bool) -> dict[str, str]:
        """`work`: the fields of `attention_peers.Work`. Returns version and device."""
        self.cuda, self.tiny = torch.cuda.is_available(), tiny
        device = "cuda" if self.cuda else "cpu"
        torch.manual_seed(0)
        batch, length, dim = work["batch"], work["length"], work["head_dim"]
        self.decode, self.causal = work["query_len"] == 1, work["query_len"] == length

        def normal(num_heads: int, num_tokens: int) -> Any:
            shape = (batch, num_heads, num_tokens, dim)
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        self.q = normal(work["num_heads"], work["query_len"])
        kv_heads = work["num_kv_heads"]
        self.kv = [(normal(kv_heads, length), normal(kv_heads, length)) for _ in range(2)]
        self.launches = self._launches()
        return {"torch": torch.__version__, "device": device}

    def seconds(self) -> dict[str, float | str]:
        """Seconds of one call by variant: a median, or why it does not run."""
        return {
            name: launch if isinstance(launch, str) else self._time(launch) / CALLS
            for name, launch in self.launches.items()
        }

    def _launches(self) -> dict[str, Callable[[], None] | str]:
        """CALLS consecutive calls, on a GPU as one graph; or why a variant is not supported."""
        backends = {"flash": SDPBackend.FLASH_ATTENTION}
        if self.cuda:
            backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
            backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
        variants = {"": self._by_head}
        if self.decode:
            variants[", a group's heads as queries"] = self._group_as_queries
        launches: dict[str, Callable[[], None] | str] = {}
        for name, backend in backends.items():
            for suffix, attend in variants.items():
                try:
                    launch = self._launch(partial(self._with_backend, backend, attend))
                except RuntimeError as error:  # no kernel for such arguments
                    launch = " ".join(str(error).split())[:200]
                launches[f"torch SDPA ({name}{suffix})"] = launch
        if self.cuda:  # on a CPU it would take a C++ compiler
            launches["torch FlexAttention"] = self._flex()
        return launches

    def _flex(self) -> Callable[[], None] | str:
        try:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            mask, length = None, self.q.shape[2]
            if self.causal:
                mask = create_block_mask(
                    lambda b, h, q, k: q >= k, None, None, length, length, device=self.q.device
                )
            compiled = torch.compile(flex_attention, dynamic=False)
            return self._launch(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True))
        except Exception as error:  # any error of its compilers
            return " ".join(f"{type(error).__name__}: {error}".split())[:200]

    def _with_backend(self, backend: Any, attend: Callable, q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    def _by_head(self, q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)

    def _group_as_queries(self, q: Any, k: Any, v: Any) -> Any:
        """A single query sees all keys, so the heads that share a KV head can be queries of one head."""
        grouped = q.reshape(*k.shape[:2], -1, k.shape[3])
        return scaled_dot_product_attention(grouped, k, v).reshape(q.shape)

    def _launch(self, attend: Callable[[Any, Any, Any], Any]) -> Callable[[], None]:
        @torch.no_grad()
        def calls() -> None:
            q = self.q
            for i in range(CALLS):
                q = attend(q, *self.kv[i % len(self.kv)])

        if not self.cuda:
            calls()
            return calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # graphs require a warm-up on another stream
            calls()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return graph.replay

    def _time(self, launch: Callable[[], None]) -> float:
        """Median seconds of a launch."""
        timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
        return (timer.timeit(2) if self.tiny else timer.blocked_autorange(min_run_time=0.1)).median
