"""The engines that a benchmark compares, each in a child process of its own, told by a pipe to run.

Both ends of the pipe are here: `PeerProcess` in the benchmark, `serve` in the child. The file
imports only the standard library at its top and is run as a script, so a peer's Python need not
have jaxpage installed. It knows nothing of workloads: a peer runs what it is given and tells the
seconds. A further engine is a further class in PEERS.

The pipe carries one JSON object a line: {"setup": {...}} or {"run": {...}} down, {"answer": ...}
or {"error": traceback} up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every peer is set up with."""

    threads: int
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests to be answered greedily, each with exactly its number of tokens: EOS is ignored."""

    prompts: list[list[int]]
    num_tokens: list[int]
    static_batch: int  # how many requests an engine without continuous batching takes at a time


class Peer(Protocol):
    """One engine, in the child process."""

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        """Load the checkpoint `folder` and return versions. A second call replaces the first."""
        ...

    def run(self, work: Work) -> tuple[float, int]:
        """Answer the requests; seconds from the first token in to the last token out, and how
        many tokens came out for them."""
        ...


class Jaxpage:
    def setup(self, folder: str, options: Options) -> dict[str, str]:
        sys.path.insert(
            0, str(Path(__file__).resolve().parents[2])
        )  # a checkout need not be installed
        import jax

        from jaxpage import LLM

        self.llm = None  # frees the KV pool of an earlier setup
        self.llm = LLM(
            folder,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=options.prefix_caching,
            skip_tokenizer_init=True,
        )
        self.llm.wait_until_warm()
        return {"jax": jax.__version__}

    def run(self, work: Work) -> tuple[float, int]:
        from jaxpage import SamplingParams

        assert self.llm is not None
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in work.num_tokens
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


class TransformersGenerate:
    """`generate`: static batches, padded on the left, each as long as its longest request."""

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        self.model, versions = _load_transformers(folder, options)
        return versions

    def run(self, work: Work) -> tuple[float, int]:
        import torch

        start = time.perf_counter()
        num_tokens = 0
        for first in range(0, len(work.prompts), work.static_batch):
            prompts = work.prompts[first : first + work.static_batch]
            wanted = work.num_tokens[first : first + work.static_batch]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            config = _greedy(max(wanted))
            outputs = self.model.generate(ids, attention_mask=mask, generation_config=config)
            assert outputs.shape[1] == longest + max(wanted)
            num_tokens += sum(wanted)  # the others are of no use to anybody
        return time.perf_counter() - start, num_tokens


class TransformersContinuous:
    """The continuous batching of transformers 5, its background thread kept between runs."""

    def __init__(self) -> None:
        self.manager: Any = None

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        from transformers import ContinuousBatchingConfig

        self.close()
        self.model, versions = _load_transformers(folder, options)
        page_size = 64
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=options.max_num_seqs * -(-options.max_model_len // page_size),
            max_batch_tokens=2048,
            max_requests_per_batch=options.max_num_seqs,
            allow_block_sharing=options.prefix_caching,
            auto_switch_to_flash=False,  # there is none for the CPU
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=_greedy(options.max_model_len), continuous_batching_config=config
        )
        self.manager.start()
        return versions

    def run(self, work: Work) -> tuple[float, int]:
        start = time.perf_counter()
        for prompt, num_tokens in zip(work.prompts, work.num_tokens, strict=True):
            self.manager.add_request(prompt, max_new_tokens=num_tokens)
        num_tokens = 0
        for _ in work.prompts:
            result = self.manager.get_result(timeout=600)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            num_tokens += len(result.generated_tokens)
        return time.perf_counter() - start, num_tokens

    def close(self) -> None:
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager.destroy()


def _load_transformers(folder: str, options: Options) -> tuple[Any, dict[str, str]]:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return model.eval(), versions


def _greedy(max_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0
    )


PEERS: dict[str, type[Peer]] = {
    "jaxpage": Jaxpage,
    "transformers-generate": TransformersGenerate,
    "transformers-continuous": TransformersContinuous,
}


class PeerProcess:
    """A peer's child process, seen from the benchmark. It works only while it is asked."""

    def __init__(self, name: str, python: str = sys.executable) -> None:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        self.name = name
        self._process = subprocess.Popen(
            # -P: this folder must not come before the peer's own packages
            [python, "-P", str(Path(__file__).resolve()), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def setup(self, folder: Path, options: Options) -> dict[str, str]:
        return self._ask({"setup": {"folder": str(folder), "options": asdict(options)}})

    def run(self, work: Work) -> float:
        """Seconds that the peer needed. Raises RuntimeError if it answered too little or died."""
        seconds, num_tokens = self._ask({"run": asdict(work)})
        if num_tokens != sum(work.num_tokens):
            raise RuntimeError(
                f"{self.name} gave {num_tokens} tokens instead of {sum(work.num_tokens)}"
            )
        return seconds

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name} failed:\n{reply['error']}")
        return reply["answer"]

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the child's loop ends
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve(name: str) -> None:
    """The child: answer until the pipe closes. What libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = PEERS[name]()
    for line in sys.stdin:
        try:
            answer = _answer(peer, json.loads(line))
            reply = {"answer": answer}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    # A peer's background threads must not hold the process back.
    os._exit(0)


def _answer(peer: Peer, message: dict[str, Any]) -> Any:
    if "run" in message:
        return peer.run(Work(**message["run"]))
    options = Options(**message["setup"]["options"])
    # Both XLA's and OpenMP's thread pools are as large as the set of allowed processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    return peer.setup(message["setup"]["folder"], options)


if __name__ == "__main__":
    serve(sys.argv[1])
