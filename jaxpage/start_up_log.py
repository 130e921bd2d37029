"""What an engine logs when it starts: a few lines. With DEBUG also its options.

Knows the properties of a finished engine. Must not know how it was built, and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxpage.config import ResolvedConfig
from jaxpage.draft_model import DraftModel
from jaxpage.engine_spec import EngineSpec, LoadedModel, bytes_on_one_device
from jaxpage.environment import vllm_variables
from jaxpage.hub import display_name
from jaxpage.ops.attention import describe
from jaxpage.ops.implementations import Choice
from jaxpage.recurrent_state import choose_kernel, sequence_bytes
from jaxpage.runner.programs import Programs
from jaxpage.weights.spec import specs

logger = logging.getLogger("jaxpage")


def print_unless_configured() -> None:
    """Log to stderr, unless the user has configured logging."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def log_replicas(specs: Sequence[EngineSpec]) -> None:
    """How many engines there are, if there are several, and where. The other lines describe one of them."""
    if len(specs) > 1:
        devices = [", ".join(str(device.id) for device in spec.devices) for spec in specs]
        logger.info("replicas  %d, on devices %s; each:", len(specs), " | ".join(devices))


def log_engine(spec: EngineSpec, slow_products: set[str], *, level: int = logging.INFO) -> None:
    """The lines before compilation; at INFO also warnings."""
    logger.debug("%s", spec.config.describe())

    def level_of(no_kernel_reason: str | None) -> int:
        is_slow = no_kernel_reason is not None and level >= logging.INFO
        return logging.WARNING if is_slow else level

    logger.log(level, "%s", model_line(spec))
    if (drafts := spec.draft_model) is not None:
        logger.log(level_of(drafts.no_kernel_reason), "%s", draft_model_line(spec, drafts))
    logger.log(level_of(spec.no_kernel_reason), "%s", device_line(spec))
    logger.log(level, "%s", kv_cache_line(spec))
    if spec.step_spec.recurrent is not None:
        logger.log(level_of(_choice_of_kernel(spec).reason), "%s", recurrent_state_line(spec))
    if level < logging.INFO:
        return
    for line in sorted(slow_products):
        logger.warning("%s", line)
    log_options_without_effect(spec.config)


def log_options_without_effect(config: ResolvedConfig) -> None:
    names, drafts = list(config.options_without_effect), config.speculative_config
    may_run_code = "trust_remote_code" in names
    if may_run_code:
        names.remove("trust_remote_code")
    if drafts is not None and drafts.draft_tensor_parallel_size is not None:
        names.append("draft_tensor_parallel_size")
    if names:
        logger.warning("options without effect here: %s", ", ".join(names))
    if variables := vllm_variables():
        logger.warning("environment variables without effect here: %s", ", ".join(variables))
    if may_run_code:
        logger.warning(
            "trust_remote_code=True: code of a checkpoint is never run, this model does without it"
        )


def log_ready(programs: Sequence[Programs], *, ahead_of_time: bool, seconds: float) -> None:
    """The lines after compilation of what a first prompt needs; the other programs follow in the background."""
    logger.info("%s", programs_line(programs, ahead_of_time=ahead_of_time))
    logger.info("ready     after %.1f s", seconds)


def model_line(spec: EngineSpec) -> str:
    return f"model     {_describe(spec, spec.models[0])}"


def draft_model_line(spec: EngineSpec, drafts: DraftModel) -> str:
    eagle = drafts.model.config.eagle
    what = "the MTP layer of " if eagle is not None and eagle.mtp_layer is not None else ""
    line = f"drafts    {what}{_describe(spec, spec.models[1])}; at most {spec.config.num_drafts} tokens a step"
    if drafts.no_kernel_reason is None:
        return line
    return f"{line}; attention: {describe(drafts.pool.attention, drafts.no_kernel_reason)}"


def _describe(spec: EngineSpec, loaded: LoadedModel) -> str:
    described = specs(loaded.model).values()
    count = sum(each.num_weights for each in described)
    size = sum(bytes_on_one_device(each, spec.mesh) for each in described)
    return (
        f"{display_name(loaded.folder)} ({loaded.model.config.architecture}), "
        f"{_short(count)} parameters in {spec.config.dtype}, {_short(size)}B"
        + (" on each device" if spec.num_devices > 1 else "")
    )


def device_line(spec: EngineSpec) -> str:
    several = f"{spec.num_devices} x " if spec.num_devices > 1 else ""
    return f"device    {several}{spec.device.device_kind}, attention: {spec.attention}"


def kv_cache_line(spec: EngineSpec) -> str:
    pool = spec.pool
    num_bytes = sum(each.num_bytes for each in spec.pools)
    # A token has a slot in each group; the null block holds none.
    num_tokens = (pool.num_blocks - 1) * pool.block_size // len(spec.groups.windows)
    return (
        f"KV cache  {num_tokens:,} tokens in {pool.num_blocks:,} blocks of {pool.block_size}, "
        f"{_short(num_bytes)}B in {spec.config.kv_cache_dtype}; a sequence has at most "
        f"{spec.config.max_model_len:,} tokens"
    )


def recurrent_state_line(spec: EngineSpec) -> str:
    """Of running sequences and of the prefix cache, with their bytes on all devices, and what changes their matrices,
    if they have any.
    """
    model, number = spec.model.config, spec.config.max_num_seqs
    assert model.recurrent is not None
    size = sequence_bytes(model.recurrent, model.dtype, num_drafts=spec.config.num_drafts)
    num_cached = spec.step_spec.num_cached_states
    cached = f"{_short(num_cached * size)}B for {num_cached} in the" if num_cached else "no"
    line = f"state     {_short(number * size)}B of recurrent state for {number} sequences, {cached} prefix cache"
    if not model.recurrent.has_matrix:
        return line
    choice = _choice_of_kernel(spec)
    return f"{line}, decode: {describe(choice.name, choice.reason)}"


def _choice_of_kernel(spec: EngineSpec) -> Choice[str | None]:
    return choose_kernel(spec.model.config, spec.hardware, num_devices=spec.num_devices)


def programs_line(programs: Sequence[Programs], *, ahead_of_time: bool) -> str:
    total = sum(len(each.names) for each in programs)
    if not ahead_of_time:
        return f"programs  {total}, each compiled at its first use (enforce_eager)"
    ready = [program for each in programs for program in list(each.ready.values())]
    num_compiled = sum(program.origin == "compiled" for program in ready)
    left = total - len(ready)
    behind = f"; {left} follow behind the first requests" if left else ""
    return f"programs  {total}: {len(ready) - num_compiled} cached, {num_compiled} compiled{behind}"


def _short(number: float) -> str:
    """12,345,678 as "12.3 M"."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
