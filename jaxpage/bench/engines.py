"""How jaxpage, transformers and vLLM are driven, in the process of a peer.

Each class imports its engine when it is set up, and this file nothing but the standard library: it
runs in the engine's own environment. Must not know workloads, nor the other engines.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from jaxpage.bench.peers import Options, Work


class Jaxpage:
    package: ClassVar[str] = "jax"
    environment: ClassVar[dict[str, str]] = {}
    options: ClassVar[dict[str, Any]] = {}  # of the engine, over those of the benchmark

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        # A checkout need not be installed.
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        import jax

        from jaxpage import LLM

        given = {
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "enable_prefix_caching": options.prefix_caching,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(folder, **(given | self.options))
        self.llm.wait_until_warm()
        return {"jax": jax.__version__}

    def run(self, work: Work) -> tuple[float, int]:
        from jaxpage import SamplingParams

        return _run_llm(self.llm, SamplingParams, work)


class JaxpageInt8(Jaxpage):
    options: ClassVar[dict[str, Any]] = {"quantization": "int8"}


class JaxpageNoPrefixCache(Jaxpage):
    options: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}


class Vllm:
    """vLLM for CPU, all of it in this process: workers of its own would poll for work on our cores.

    So its threads are those of the process: as many as it is allowed processors.
    """

    package: ClassVar[str] = "vllm"
    environment: ClassVar[dict[str, str]] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        import torch

        vllm = importlib.import_module("vllm")
        self.llm = vllm.LLM(
            folder,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=options.prefix_caching,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,  # compiling pays on a GPU; here it costs minutes
            kv_cache_memory_bytes=4 << 30,
        )
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def run(self, work: Work) -> tuple[float, int]:
        return _run_llm(self.llm, importlib.import_module("vllm").SamplingParams, work)


def _run_llm(llm: Any, params_of: Any, work: Work) -> tuple[float, int]:
    """Through `LLM.generate`, which jaxpage and vLLM call alike."""
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    params = [
        params_of(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in work.num_tokens
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


class TransformersGenerate:
    """`generate`: static batches, padded on the left, each as long as its longest request."""

    package: ClassVar[str] = "transformers"
    environment: ClassVar[dict[str, str]] = {}

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

    package: ClassVar[str] = "transformers"
    environment: ClassVar[dict[str, str]] = {}

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        model, versions = _load_transformers(folder, options)
        return versions | self.start(model, options, page_size=64)

    def start(
        self, model: Any, options: Options, *, page_size: int | None = None
    ) -> dict[str, str]:
        """Begin to serve a model that is in place. Without a `page_size` it is their default. Says how it attends.

        With less than 15 % of the pages free they take no new prompts, so there are a quarter more than requests fill.
        """
        from transformers import ContinuousBatchingConfig

        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        page = "page_size" if "page_size" in known else "block_size"  # until 5.17
        size: int = page_size or getattr(ContinuousBatchingConfig(), page)
        wanted = {
            page: size,
            "num_blocks": options.max_num_seqs * -(-options.max_model_len // size) * 5 // 4,
            "max_batch_tokens": 2048,
            "max_requests_per_batch": options.max_num_seqs,
            "allow_block_sharing": options.prefix_caching,
        }
        if model.device.type == "cpu" and "auto_switch_to_flash" in known:
            wanted["auto_switch_to_flash"] = False  # there is none for a CPU
        self.manager = model.init_continuous_batching(
            generation_config=_greedy(options.max_model_len),
            continuous_batching_config=ContinuousBatchingConfig(**wanted),
        )
        self.manager.start()
        return {"attention": str(model.config._attn_implementation)}

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
