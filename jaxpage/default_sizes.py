"""The sizes of an engine for which no option is given, by its kind of device."""

BLOCK_SIZES = {"cpu": 16, "gpu": 64, "tpu": 128}
_TPU_TOKENS = (("v6", 2048), ("v5 lite", 1024), ("v5e", 1024), ("v5", 512))
_GIB = 2**30


def batch_limits(platform: str, device_kind: str, device_memory: int | None) -> tuple[int, int]:
    """Default (max_num_seqs, max_num_batched_tokens): vLLM's for offline use, with half as many tokens on a CPU.

    Two cores compute 2048 tokens of a 0.5B model in four seconds, and all other requests wait for the step.
    """
    if platform == "cpu":
        return 256, 2048
    if platform == "tpu":
        tokens = (n for name, n in _TPU_TOKENS if name in device_kind.lower())
        return 256, next(tokens, 2048)
    # 70 GiB distinguishes H100 and newer GPUs from the rest, except for the slower 80 GB A100.
    if (device_memory or 0) >= 70 * _GIB and "a100" not in device_kind.lower():
        return 1024, 16384
    return 256, 8192
