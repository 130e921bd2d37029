"""Quantised checkpoints, written in the layouts of the tools that make them, and what their weights mean.

`write` makes one of any float checkpoint (`checkpoints.build`) in one of `FORMATS`, and returns its weights
dequantised; `write_float` makes a plain checkpoint of these, for an oracle. Shares no code with the loader, and needs
no torch. What AutoAWQ, AutoGPTQ and compressed-tensors make of these files was compared with the weights returned: the
same bits, but for what they round to their own type. "gptq-4-wrong-version" is what AutoGPTQ cannot read.
"""

from tests.quantized_checkpoints import compressed_tensors, float8, packed
from tests.quantized_checkpoints.format import Format
from tests.quantized_checkpoints.write import write, write_float

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (*packed.FORMATS, *float8.FORMATS, *compressed_tensors.FORMATS)
}

__all__ = ["FORMATS", "Format", "write", "write_float"]
