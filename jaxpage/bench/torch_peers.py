"""What torch and transformers do with the same work, in a process of their own (`children.py`).

Imports them where they are used, and neither jax nor the rest of jaxpage. Must not know what it is compared with.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpage.bench.engines import TransformersContinuous
from jaxpage.bench.peers import Options, Work

CALLS = 8  # of attention in one launch


class Attention:
    """torch's `scaled_dot_product_attention` on contiguous keys and values, each backend that takes them."""

    def setup(self, work: dict[str, Any], tiny: bool) -> dict[str, str]:
        """`work`: the fields of `attention_peers.Work`. Versions. Raises ImportError without torch."""
        import torch

        self.cuda = torch.cuda.is_available()
        device = "cuda" if self.cuda else "cpu"
        torch.manual_seed(0)
        batch, length, decode = work["batch"], work["length"], work["decode"]
        heads, kv_heads, dim = work["num_heads"], work["num_kv_heads"], work["head_dim"]

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        self.q = normal(batch, heads, 1 if decode else length, dim)
        kv = (batch, kv_heads, length, dim)
        self.kv = [(normal(*kv), normal(*kv)) for _ in range(2)]
        self.decode, self.tiny = decode, tiny
        self.launches = self._launches()
        return {"torch": torch.__version__, "device": device}

    def seconds(self) -> dict[str, float | str]:
        """Of one call, by variant: a median, or why it does not run."""
        times: dict[str, float | str] = {}
        for name, launch in self.launches.items():
            times[name] = launch if isinstance(launch, str) else self._time(launch) / CALLS
        return times

    def _variants(self) -> dict[str, Callable[[Any, Any, Any], Any]]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sdpa = torch.nn.functional.scaled_dot_product_attention
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
        if not self.cuda:
            backends = {"flash": SDPBackend.FLASH_ATTENTION}

        def heads_of_a_group(q: Any, k: Any, v: Any) -> Any:
            return sdpa(q, k, v, is_causal=not self.decode, enable_gqa=True)

        def group_as_queries(q: Any, k: Any, v: Any) -> Any:
            """One query sees all keys, so the heads that share a KV head may as well be queries of one head."""
            return sdpa(q.reshape(k.shape[0], k.shape[1], -1, k.shape[3]), k, v).reshape(q.shape)

        ways = {"": heads_of_a_group}
        if self.decode:
            ways[", a group's heads as queries"] = group_as_queries

        def bound(backend: Any, way: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
            def run(q: Any, k: Any, v: Any) -> Any:
                with sdpa_kernel(backend):
                    return way(q, k, v)

            return run

        return {
            f"torch SDPA ({name}{suffix})": bound(backend, way)
            for name, backend in backends.items()
            for suffix, way in ways.items()
        }

    def _launches(self) -> dict[str, Callable[[], None] | str]:
        """CALLS calls that follow one another, on a GPU as one graph; or why a variant cannot serve."""
        launches: dict[str, Callable[[], None] | str] = {}
        for name, attend in self._variants().items():
            try:
                launches[name] = self._launch(attend)
            except RuntimeError as error:  # no kernel for such arguments
                launches[name] = " ".join(str(error).split())[:200]
        return launches

    def _launch(self, attend: Callable[[Any, Any, Any], Any]) -> Callable[[], None]:
        import torch

        def calls() -> None:
            q = self.q
            for i in range(CALLS):
                q = attend(q, *self.kv[i % len(self.kv)])

        with torch.no_grad():
            if not self.cuda:
                calls()
                return torch.no_grad()(calls)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # as graphs want it: warmed up on another stream
                calls()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
        return graph.replay

    def _time(self, launch: Callable[[], None]) -> float:
        """Median seconds of a launch, of samples that each fill 20 ms."""

        def sample(launches: int) -> float:
            self._wait()
            start = time.perf_counter()
            for _ in range(launches):
                launch()
            self._wait()
            return (time.perf_counter() - start) / launches

        sample(1)
        launches = 1 if self.tiny else max(1, round(0.02 / sample(1)))
        return statistics.median(sample(launches) for _ in range(1 if self.tiny else 5))

    def _wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()


class ContinuousBatching:
    """transformers' continuous batching of a model with random weights, on the GPU if there is one."""

    def setup(self, folder: str, options: dict[str, Any]) -> dict[str, str]:
        """`folder` needs nothing but config.json; `options` are the fields of `peers.Options`."""
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(
            **json.loads((Path(folder) / "config.json").read_text())
        )
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.engine = TransformersContinuous()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return versions | self.engine.start(model.eval(), Options(**options))

    def seconds(self, work: dict[str, Any]) -> float:
        """For the fields of `peers.Work`. Raises RuntimeError if tokens are missing."""
        given = Work(**work)
        taken, num_tokens = self.engine.run(given)
        if num_tokens != sum(given.num_tokens):
            raise RuntimeError(f"{num_tokens} tokens instead of {sum(given.num_tokens)}")
        return taken
