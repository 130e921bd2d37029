"""Both engines behind one method, in processes of their own (`jaxpage.bench.subprocess_rpc`): plain data in and out.

A request is `{"prompt": text or ids, "fields": fields of SamplingParams}`. An answer is either `{"refused": message}`,
or `{"crashed": message}` if no ValueError was raised, or the fields of a `RequestOutput` as plain data.

Each class imports its engine when it is set up, since it runs in the engine's own environment.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

Request = dict[str, Any]
Answer = dict[str, Any]

MAX_MODEL_LEN = 96
OPTIONS = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "enforce_eager": True,
}


class Engine:
    """What both share: `LLM.generate`."""

    module: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {}  # set before anything is imported
    options: ClassVar[dict[str, Any]] = {}  # of the engine, besides those of all

    def setup(self, folder: str, options: dict[str, Any]) -> dict[str, str]:
        """Load the checkpoint `folder`; returns versions. Called once."""
        self.api = importlib.import_module(self.module)
        self.folder, self.given = folder, OPTIONS | self.options | options
        self.llm = self.api.LLM(folder, **self.given)
        return {self.module: self.api.__version__}

    def answer(self, request: Request) -> Answer:
        try:
            params, more = self.params(dict(request["fields"]))
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        prompt = request["prompt"]
        prompt = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        try:
            (output,) = self.llm.generate([prompt], params, use_tqdm=False, **more)
        except Exception as error:
            is_refusal = isinstance(error, ValueError) or "Validation" in type(error).__name__
            return {"refused" if is_refusal else "crashed": f"{type(error).__name__}: {error}"}
        return plain_output(output)

    def params(self, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(SamplingParams, further arguments of `generate`)."""
        return self.api.SamplingParams(**fields), {}


class Jaxpage(Engine):
    module = "jaxpage"
    options = {"max_num_batched_tokens": 128}

    def setup(self, folder: str, options: dict[str, Any]) -> dict[str, str]:
        self.scoring: dict[str, Any] = {}
        return super().setup(folder, options)

    def logits(self, request: Request, mode: str) -> dict[str, Any]:
        """The answer with all ids in each row of its logprobs. `mode`: a `logprobs_mode` of logits."""
        if mode not in self.scoring:
            given = self.given | {"logprobs_mode": mode}
            self.scoring[mode] = self.api.LLM(self.folder, **given)
        fields = {k: v for k, v in request["fields"].items() if k not in OF_LOGPROBS}
        wanted = {"logprobs": -1, "prompt_logprobs": -1}
        self.llm, usual = self.scoring[mode], self.llm
        try:
            return self.answer(request | {"fields": fields | wanted})
        finally:
            self.llm = usual


class Vllm(Engine):
    """vLLM for CPU, all of it in this process. Needs neither jax nor jaxpage's packages."""

    module = "vllm"
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    # A request may always ask jaxpage for all logprobs.
    options = {"max_logprobs": -1}

    def setup(self, folder: str, options: dict[str, Any]) -> dict[str, str]:
        # llguidance, as in jaxpage. xgrammar's JSON has other whitespace, and what a grammar leaves no choice about may
        # come in other tokens.
        config = {"backend": "guidance"} | options.get("structured_outputs_config", {})
        return super().setup(folder, options | {"structured_outputs_config": config})

    def params(self, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        types = importlib.import_module("vllm.sampling_params")
        more = {}
        length = fields.pop("truncate_prompt_tokens", None)
        if length is not None:
            more = {"tokenization_kwargs": {"truncate_prompt_tokens": length}}
        for name, kind in (
            ("structured_outputs", types.StructuredOutputsParams),
            ("repetition_detection", types.RepetitionDetectionParams),
        ):
            if isinstance(fields.get(name), dict):
                fields[name] = kind(**fields[name])
        return super().params(fields)[0], more


OF_LOGPROBS = (
    "logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start",
)  # fmt: skip


def plain_output(output: Any) -> Answer:
    """A `RequestOutput` as dicts, lists and scalars."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": rows(output.prompt_logprobs),
        "prompt_logprobs_type": type(output.prompt_logprobs).__name__,
        "completions": [
            {
                "token_ids": list(completion.token_ids),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "cumulative_logprob": completion.cumulative_logprob,
                "logprobs": rows(completion.logprobs),
                "logprobs_type": type(completion.logprobs).__name__,
            }
            for completion in output.outputs
        ],
    }


def rows(logprobs: Any) -> list[list[tuple[int, float, int | None, str | None]] | None] | None:
    """(id, logprob, rank, text) of each entry, in its order, for each token; None where there are none."""
    if logprobs is None:
        return None
    return [
        row and [(i, x.logprob, x.rank, x.decoded_token) for i, x in row.items()]
        for row in logprobs
    ]
