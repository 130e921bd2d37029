"""The quantisation method "compressed-tensors", as llm-compressor writes it."""

FORMATS = ()
