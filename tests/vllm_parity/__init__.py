"""Do jaxpage and vLLM answer the same requests with the same tokens, texts, reasons and logprobs?

`python -m tests.vllm_parity --vllm PYTHON`: a script, not collected by pytest, that needs vLLM 0.32 for a CPU in an
environment of its own. It draws requests at random, of every field of `SamplingParams` that leaves nothing to chance,
and asks both engines the same, in float32. What differs is shrunk to the fewest fields that still differ, and must be a
near tie or one of the differences of `known.py`; else the exit status is 1.
"""
