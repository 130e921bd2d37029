"""Slices of swizzled shared memory that Mosaic GPU's code would misread, as it was seen to on an H200 (jax 0.11.2).

Mosaic GPU chooses by itself how shared memory without transforms is swizzled, and may choose tiles of fewer than 8
lines. Code that loads or stores a slice then counts lines of 128 bytes from where the slice begins, while TMA knows
their addresses. A slice of columns agrees if rows have at most 128 bytes; rows are not looked at, whose first must be a
multiple of 8.

`python -m tests.aot.swizzles` lowers the kernels for an H200; their final form goes to MOSAIC_GPU_DUMP_TO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

DUMPS = "*.after_layout_inference.txt"
LINE = 128  # bytes
SHAPES = ("gqa-16-2", "head-dim-96", "head-dim-256", "head-dim-512", "int8", "latents-16")
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i8": 1, "f8E4M3FN": 1, "f8E5M2": 1, "i32": 4}
_TRANSFER = re.compile(
    r'"mosaic_gpu\.vector_(?:load|store)".*in_transforms = \[\[#mosaic_gpu\.tile<\[(?P<lines>\d+), \d+\]>, '
    r"#mosaic_gpu\.swizzle<.*memref<(?:\d+x)+(?P<dtype>\w+), strided<\[(?P<strides>[\d, ]+)\]"
)


def transfers(text: str) -> list[re.Match[str]]:
    """The loads and stores of a kernel whose slice of shared memory is swizzled."""
    return [found for line in text.splitlines() if (found := _TRANSFER.search(line))]


def misread(text: str) -> Iterator[str]:
    """Those of them that compute wrong addresses."""
    for found in transfers(text):
        *_, row, column = (int(each) for each in found["strides"].split(","))
        if int(found["lines"]) < 8 and column == 1 and row * _BYTES[found["dtype"]] > LINE:
            yield found[0]


def kernels() -> Iterator[tuple[str, Any]]:
    """Name and how to lower it: attention, and a call of each other kernel."""
    import jax

    from tests.aot import grouped_matmul, lora, matmul, quant_matmul
    from tests.aot import paged_attention_gpu as attention

    with jax.set_mesh(attention._mesh(1)):
        for name in SHAPES:
            # A step with prompts has all of its kernels.
            options = dict(rows=64, tokens=8192, **attention.ATTENTION[name])
            yield name, partial(attention.attention, **options)
    for suite in (grouped_matmul, lora, matmul, quant_matmul):
        for program in islice(suite.programs("h200"), 1):
            yield program.name, program.lower


def main() -> None:
    for name, lower in kernels():
        lower()
        print(name, flush=True)


if __name__ == "__main__":
    main()
