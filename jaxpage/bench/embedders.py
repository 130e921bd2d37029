"""The engines of `bench embed`, as they are driven in separate processes.

Each class imports its engine in `setup`, because it runs in the engine's own environment.
"""

from __future__ import annotations

import time
from typing import Any


class Jaxpage:
    """`LLM.embed`."""

    def setup(self, folder: str, dtype: str) -> str:
        """Load the checkpoint; returns the version."""
        import jax

        from jaxpage import LLM, __version__

        self._llm = LLM(folder, dtype=dtype)
        self._llm.wait_until_warm()
        return f"jaxpage {__version__}, jax {jax.__version__}"

    def run(self, texts: list[str]) -> tuple[float, float, list[float]]:
        """Seconds for all texts, of the clock and of processors; and the last embedding."""
        start, start_cpu = time.perf_counter(), time.process_time()
        outputs = self._llm.embed(texts, use_tqdm=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        return seconds, cpu, outputs[-1].outputs.embedding


class SentenceTransformers:
    """`SentenceTransformer.encode`."""

    def setup(self, folder: str, dtype: str) -> str:
        """Load the checkpoint; returns the version."""
        import sentence_transformers  # type: ignore[import-not-found]
        import torch

        kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        self._model = sentence_transformers.SentenceTransformer(
            folder, device="cpu", model_kwargs=kwargs, local_files_only=True
        )
        versions = sentence_transformers.__version__, torch.__version__, torch.get_num_threads()
        return "sentence-transformers {}, torch {}, {} threads".format(*versions)

    def run(self, texts: list[str]) -> tuple[float, float, list[float]]:
        """Seconds for all texts, of the clock and of processors; and the last embedding."""
        start, start_cpu = time.perf_counter(), time.process_time()
        found = self._model.encode(texts, batch_size=32, show_progress_bar=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        return seconds, cpu, [float(x) for x in found[-1]]
