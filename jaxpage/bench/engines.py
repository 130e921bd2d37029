"""How jaxpage, transformers and vLLM are driven, in the process of a peer.

Each class imports its engine when it is set up, since it runs in the engine's own environment.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxpage.bench.work import Options, Work


class Peer(Protocol):
    """One engine."""

    package: ClassVar[str]  # which its Python must have
    environment: ClassVar[dict[str, str]] = {}  # set before anything is imported

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        """Load the checkpoint `folder` and return versions. Called once."""
        ...

    def run(self, work: Work) -> tuple[float, int]:
        """Seconds from the first token in to the last token out, and how many tokens came out."""
        ...


class Jaxpage(Peer):
    package = "jax"
    options: ClassVar[dict[str, Any]] = {}  # of the engine, over those of the benchmark

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        import jax

        from jaxpage import LLM, SamplingParams

        given = {
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "enable_prefix_caching": options.prefix_caching,
            "skip_tokenizer_init": True,
        }
        self.llm, self.params = LLM(folder, **(given | self.options)), SamplingParams
        self.llm.wait_until_warm()
        return {"jax": jax.__version__}

    def run(self, work: Work) -> tuple[float, int]:
        return run_llm(self.llm, self.params, work)


class JaxpageInt8(Jaxpage):
    options: ClassVar = {"quantization": "int8"}


class JaxpageNoPrefixCache(Jaxpage):
    options: ClassVar = {"enable_prefix_caching": False}


class Vllm(Peer):
    """vLLM for CPU, all of it in this process: workers of its own would poll for work on our cores.

    So its threads are those of the process: as many as it is allowed processors.
    """

    package = "vllm"
    environment: ClassVar = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        import torch

        vllm = importlib.import_module("vllm")
        self.params = vllm.SamplingParams
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
        return run_llm(self.llm, self.params, work)


def run_llm(llm: Any, params_of: Any, work: Work) -> tuple[float, int]:
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


class TransformersGenerate(Peer):
    """`generate`: static batches, padded on the left, each as long as its longest request."""

    package = "transformers"

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        self.model, versions = load_transformers(Path(folder), options)
        return versions

    def run(self, work: Work) -> tuple[float, int]:
        import torch

        start = time.perf_counter()
        for first in range(0, len(work.prompts), work.static_batch):
            prompts = work.prompts[first : first + work.static_batch]
            most = max(work.num_tokens[first : first + work.static_batch])
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            outputs = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=_greedy(most),
            )
            assert outputs.shape[1] == longest + most
        # Tokens beyond a request's own number are of no use to anybody.
        return time.perf_counter() - start, work.num_output_tokens


class TransformersContinuous(Peer):
    """The continuous batching of transformers 5, its background thread kept between runs."""

    package = "transformers"

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        model, versions = load_transformers(Path(folder), options)
        self.start(model, options)
        return versions | {"attention": str(model.config._attn_implementation)}

    def start(self, model: Any, options: Options) -> None:
        """Pages are of 64 tokens on a CPU, else of their default size.

        With less than 15 % of the pages free they take no new prompts, so there are a quarter more than requests fill.
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
            "allow_block_sharing": options.prefix_caching,
        }
        if on_cpu and "auto_switch_to_flash" in known:
            wanted["auto_switch_to_flash"] = False  # there is none for a CPU
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


def load_transformers(folder: Path, options: Options) -> tuple[Any, dict[str, str]]:
    """The model on the GPU if there is one, and versions. A folder with only config.json gives random weights."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    auto = transformers.AutoModelForCausalLM
    if any(folder.glob("*.safetensors")):
        model = auto.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        fields = json.loads((folder / "config.json").read_text())
        with torch.device(device):
            model = auto.from_config(
                transformers.AutoConfig.for_model(**fields), dtype=torch.bfloat16
            )
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return model.to(device).eval(), versions


def _greedy(max_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0
    )
