"""Products of few tokens with weights that are not quantized."""
