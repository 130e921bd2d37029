"""Bytes available for the KV pool, and how many blocks fit into them.

An accelerator reports its memory; on a CPU the pool takes a share of the free RAM. Knows devices and sizes in bytes.
Must not know what a block contains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxpage.kv_groups import Windows, longest_fitting, most_blocks
from jaxpage.runner.buckets import Bucket, make_buckets

logger = logging.getLogger(__name__)

# Share of the free RAM, which is also needed by the weights, the compiler and the user's own arrays.
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 << 30  # zeroing more than this would slow down start-up
SMALLEST_BUDGET = 64  # tokens: max_num_batched_tokens is not halved below this
# As in LMDeploy: with fewer blocks the largest step is halved, whatever the length of sequences.
FEWEST_BLOCKS = 16


def pool_bytes(
    devices: Sequence[jax.Device],
    *,
    utilization: float,
    temp_bytes: int,
    share_of_free: float | None = None,
) -> int:
    """Bytes for the KV pool on each of `devices`: the minimum over them.

    Call it once the weights are loaded; the largest step needs `temp_bytes` beside the pool. For accelerators see
    `pool_bytes_of`; the memory in use is measured.

    A CPU does not report its memory in use. The pool gets CPU_SHARE of the free RAM, less the temporaries, and at most
    CPU_MOST_BYTES; with `share_of_free`, that share of the free RAM less the temporaries, without a limit. Several
    devices of one CPU get equal parts of its RAM.
    """
    return min(
        _pool_bytes(device, utilization, temp_bytes, share_of_free, len(devices))
        for device in devices
    )


def _pool_bytes(
    device: jax.Device,
    utilization: float,
    temp_bytes: int,
    share_of_free: float | None,
    num_devices: int,
) -> int:
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        ram = free_ram() // num_devices
        if share_of_free is not None:
            return int(share_of_free * (ram - temp_bytes))
        return min(int(CPU_SHARE * ram) - temp_bytes, CPU_MOST_BYTES // num_devices)
    return pool_bytes_of(
        stats["bytes_limit"],
        stats["bytes_in_use"] + temp_bytes,
        utilization=utilization,
        share_of_free=share_of_free,
    )


def pool_bytes_of(
    capacity: int, used: int, *, utilization: float, share_of_free: float | None = None
) -> int:
    """Bytes for the KV pool on an accelerator with `capacity` bytes; negative if there are not enough.

    Weights, request state and temporaries take `used` bytes. The pool gets `utilization` of the capacity, less `used`;
    with `share_of_free`, that share of the unused bytes (LMDeploy's `cache_max_entry_count`).
    """
    if share_of_free is not None:
        return int(share_of_free * (capacity - used))
    return int(capacity * utilization) - used


def check_room(devices: Sequence[jax.Device], *, pool_bytes: int, host_bytes: int) -> None:
    """Raise ValueError if a KV pool of `pool_bytes` on each device, or the host blocks, exceed the free memory.

    Call it before allocating anything: a pool larger than the RAM would not raise, but get the process killed.
    """
    stats = [device.memory_stats() or {} for device in devices]
    ram = free_ram()
    on_host = any("bytes_limit" not in each for each in stats)
    if on_host:
        pool_bytes *= len(devices)
        free = ram
    else:
        free = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    if pool_bytes > free:
        raise ValueError(
            f"the KV pool would take {pool_bytes / 1e9:.2f} GB, but {devices[0].platform} has "
            f"{free / 1e9:.2f} GB free; lower kv_cache_memory_bytes or num_gpu_blocks_override, or leave them out"
        )
    left = ram - pool_bytes if on_host else ram
    if host_bytes > left:
        raise ValueError(
            f"swap_space={host_bytes / 2**30:.4g} GiB takes {host_bytes / 1e9:.2f} GB of RAM, of which "
            f"{left / 1e9:.2f} GB are free beside the KV pool; lower swap_space"
        )


def free_ram() -> int:
    """Bytes of RAM available without swapping (Linux: MemAvailable; elsewhere half of the RAM)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_ram() // 2


def total_ram() -> int:
    """Bytes of RAM, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class SequenceFootprint:
    """What determines how many blocks a sequence needs; see `kv_groups`."""

    windows: Windows
    block_size: int
    max_num_batched_tokens: int  # one sequence may have all tokens of a step

    def num_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds."""
        return most_blocks(self.windows, num_tokens, self.block_size, self.max_num_batched_tokens)

    def num_decoding_blocks(self, num_tokens: int, num_steps: int) -> int:
        """The same while it decodes, `num_steps` tokens at once: groups with a window hold fewer."""
        return most_blocks(self.windows, num_tokens, self.block_size, num_steps)

    def longest(self, limit: int, num_blocks: int) -> int:
        """Length of the longest sequence, at most `limit` tokens, that fits a pool of `num_blocks`."""
        return longest_fitting(
            self.windows,
            limit,
            num_blocks=num_blocks - 1,  # without the null block
            block_size=self.block_size,
            max_query_len=self.max_num_batched_tokens,
        )


def check_fits(
    footprint: SequenceFootprint, *, num_blocks: int, max_model_len: int, available: int
) -> None:
    """Raises ValueError unless one sequence of `max_model_len` tokens fits beside the null block."""
    largest = footprint.longest(max_model_len, num_blocks)
    if largest < max_model_len:
        raise ValueError(
            f"max_model_len={max_model_len} needs {footprint.num_blocks(max_model_len)} KV blocks of "
            f"{footprint.block_size} tokens, but {max(0, num_blocks - 1)} fit into the {available / 1e9:.2f} GB for "
            f"the KV pool; the largest max_model_len that fits is {largest}. Lower max_model_len "
            f'(or pass "auto"), or raise gpu_memory_utilization, cache_max_entry_count or kv_cache_memory_bytes,'
            f" whichever you use"
        )


def size_pool(
    *,
    available: Callable[[int], int],
    temp_bytes: Callable[[Bucket], int],
    bytes_per_block: int,
    footprint: SequenceFootprint,
    max_model_len: int,
    must_fit: bool,
    max_num_seqs: int,
) -> tuple[int, SequenceFootprint]:
    """(num_blocks, footprint): the pool that fits beside the temporaries of the largest step.

    `available(temp_bytes)`: bytes for the pool beside that many bytes of temporaries; `temp_bytes(bucket)`: bytes that
    the step of a bucket needs. The pool is no larger than `max_num_seqs` sequences of full length can fill. Temporaries
    grow with a step's tokens, so `footprint.max_num_batched_tokens` is halved while the pool, without the null block,
    cannot hold one such sequence (if one `must_fit`), or has fewer than FEWEST_BLOCKS (unless `max_num_seqs` sequences
    need fewer).
    """
    most = max_num_seqs * footprint.num_blocks(max_model_len) + 1
    if 2 * most * bytes_per_block <= available(0):
        return most, footprint  # plenty of memory: nothing to measure
    while True:
        num_tokens, of_one = footprint.max_num_batched_tokens, footprint.num_blocks(max_model_len)
        enough = max(of_one if must_fit else 1, min(FEWEST_BLOCKS, max_num_seqs * of_one))
        buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)
        num_blocks = max(0, available(temp_bytes(buckets[-1]))) // bytes_per_block
        if num_blocks > enough or num_tokens <= SMALLEST_BUDGET:
            return min(num_blocks, most), footprint
        footprint = replace(footprint, max_num_batched_tokens=num_tokens // 2)
        logger.warning(
            "only %d KV blocks fit beside a step of %d tokens; trying steps of %d",
            num_blocks,
            num_tokens,
            num_tokens // 2,
        )
