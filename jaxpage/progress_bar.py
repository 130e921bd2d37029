"""The bar that `LLM.generate` shows, as vLLM's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

from jaxpage.outputs import RequestOutput

UseTqdm = bool | Callable[..., tqdm]


@contextlib.contextmanager
def progress_bar(num_requests: int, use_tqdm: UseTqdm) -> Iterator[Callable[[RequestOutput], None]]:
    """Call what it gives with each final output."""
    if not use_tqdm:
        yield lambda output: None
        return
    make_bar = use_tqdm if callable(use_tqdm) else tqdm
    speeds = "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s"
    num_input = num_output = 0
    with make_bar(
        total=num_requests,
        desc="Processed prompts",
        dynamic_ncols=True,
        postfix=speeds.format(0, 0),
    ) as bar:

        def update(output: RequestOutput) -> None:
            nonlocal num_input, num_output
            num_input += len(output.prompt_token_ids) * len(output.outputs)
            num_output += output.metrics.num_generation_tokens
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.postfix = speeds.format(num_input / elapsed, num_output / elapsed)
            bar.update(1)

        yield update
        bar.refresh()
