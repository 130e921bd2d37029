"""The engines to compare, as they are driven in separate processes; and their work.

Each class imports its engine in `setup`, because it runs in the engine's own environment.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options that every engine is set up with."""

    max_model_len: int
    max_num_seqs: int
    enable_prefix_caching: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Requests to answer greedily, each with exactly its number of tokens: EOS is ignored."""

    prompts: list[list[int]]
    num_tokens: list[int]
    static_batch: int  # how many requests an engine without continuous batching takes at once

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_tokens)


class Peer:
    """One engine."""

    environment: ClassVar[dict[str, str]] = {}  # set before anything is imported

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        """Load the checkpoint `folder` and return package versions. Called once."""
        raise NotImplementedError

    def run(self, work: Work) -> tuple[float, int]:
        """Seconds from the first input token to the last output token, and the number of output tokens."""
        raise NotImplementedError


class LLMPeer(Peer):
    """What jaxpage and vLLM have in common: `LLM.generate`."""

    def run(self, work: Work) -> tuple[float, int]:
        return run_llm(self.llm, self.params_of, work)

    def start(self, module: Any, folder: str, options: Options, **more: Any) -> None:
        self.params_of = module.SamplingParams
        given = dataclasses.asdict(options) | {"skip_tokenizer_init": True}
        self.llm = module.LLM(folder, **(given | more))


def run_llm(llm: Any, params_of: Any, work: Work, **more: Any) -> tuple[float, int]:
    """Seconds and output tokens of `generate(..., **more)`. `params_of` is the class `SamplingParams`."""
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = [params_of(max_tokens=count, **options) for count in work.num_tokens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    seconds = time.perf_counter() - start
    return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


class Jaxpage(LLMPeer):
    options: ClassVar[dict[str, Any]] = {}  # of the engine; they override the benchmark's

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        import jax

        import jaxpage

        self.start(jaxpage, folder, options, **self.options)
        self.llm.wait_until_warm()
        return {"jax": jax.__version__}


class JaxpageInt8(Jaxpage):
    options = {"quantization": "int8"}


class JaxpageStrict(Jaxpage):
    options = {"numerics": "strict"}


class JaxpageNoPrefixCache(Jaxpage):
    options = {"enable_prefix_caching": False}


class JaxpageStart:
    """In a fresh process: how long an engine takes to start."""

    def measure(self, options: dict[str, Any]) -> dict[str, float]:
        """Seconds from before the first import to each event, see `peers.starts`."""
        start = time.perf_counter()
        seconds = {}

        def note(event: str) -> None:
            seconds[event] = time.perf_counter() - start

        from jaxpage import LLM, SamplingParams

        note("imported")
        llm = LLM(**options, skip_tokenizer_init=True)
        note("built")
        run_llm(llm, SamplingParams, Work(prompts=[[3, 4, 5]], num_tokens=[1], static_batch=1))
        note("first_token")
        llm.wait_until_warm()
        note("warm")
        return seconds


class Vllm(LLMPeer):
    """vLLM for CPU, entirely in this process, because separate workers would busy-wait on our cores.

    So it has as many threads as this process may use processors.
    """

    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        import torch

        vllm = importlib.import_module("vllm")
        # Eager: compilation pays off on a GPU; here it would only cost minutes.
        more = {"dtype": "bfloat16", "enforce_eager": True, "kv_cache_memory_bytes": 4 << 30}
        self.start(vllm, folder, options, **more)
        return {"vllm": vllm.__version__, "torch": torch.__version__}


class TransformersGenerate(Peer):
    """`generate`: static batches, padded on the left, each as long as its longest request."""

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        self.model, versions = _load_transformers(Path(folder))
        return versions

    def run(self, work: Work) -> tuple[float, int]:
        import torch

        start = time.perf_counter()
        for first in range(0, len(work.prompts), work.static_batch):
            prompts = work.prompts[first : first + work.static_batch]
            most = max(work.num_tokens[first : first + work.static_batch])
            rows = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
            mask = (ids != 0).long()  # 0 is a special token, which prompts do not contain
            outputs = self.model.generate(ids, attention_mask=mask, generation_config=_greedy(most))
            assert outputs.shape[1] == ids.shape[1] + most
        # Tokens beyond a request's own number do not count.
        return time.perf_counter() - start, work.num_output_tokens


class TransformersContinuous(Peer):
    """The continuous batching of transformers 5, whose background thread persists between runs."""

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        model, versions = _load_transformers(Path(folder))
        self.start(model, options)
        return versions | {"attention": str(model.config._attn_implementation)}

    def start(self, model: Any, options: Options) -> None:
        """Pages have 64 tokens on a CPU, otherwise their default size.

        With less than 15 % of the pages free it takes no new prompts, so there are a quarter more than requests fill.
        """
        from transformers import ContinuousBatchingConfig

        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        page = "page_size" if "page_size" in known else "block_size"  # until 5.17
        on_cpu = model.device.type == "cpu"
        size: int = 64 if on_cpu else getattr(ContinuousBatchingConfig(), page)
        wanted = {
            page: size,
            "num_blocks": options.max_num_seqs * -(-options.max_model_len // size) * 5 // 4,
            "max_batch_tokens": 2048,
            "max_requests_per_batch": options.max_num_seqs,
            "allow_block_sharing": options.enable_prefix_caching,
        }
        if on_cpu and "auto_switch_to_flash" in known:
            wanted["auto_switch_to_flash"] = False  # a CPU has none
        self.batching = model.init_continuous_batching(
            generation_config=_greedy(options.max_model_len),
            continuous_batching_config=ContinuousBatchingConfig(**wanted),
        )
        self.batching.start()

    def run(self, work: Work) -> tuple[float, int]:
        start = time.perf_counter()
        for prompt, count in zip(work.prompts, work.num_tokens, strict=True):
            self.batching.add_request(prompt, max_new_tokens=count)
        num_tokens = 0
        for _ in work.prompts:
            result = self.batching.get_result(timeout=600)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            num_tokens += len(result.generated_tokens)
        return time.perf_counter() - start, num_tokens


def _load_transformers(folder: Path) -> tuple[Any, dict[str, str]]:
    """The model, on the GPU if there is one, and versions. A folder with only config.json gets random weights."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    auto, dtype = transformers.AutoModelForCausalLM, torch.bfloat16
    if any(folder.glob("*.safetensors")):
        model = auto.from_pretrained(folder, dtype=dtype)
    else:
        fields = json.loads((folder / "config.json").read_text())
        with torch.device(device):
            model = auto.from_config(transformers.AutoConfig.for_model(**fields), dtype=dtype)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    placed: Any = model.eval()
    return placed.to(device), versions


def _greedy(max_tokens: int) -> Any:
    from transformers import GenerationConfig

    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(max_new_tokens=max_tokens, **options)
