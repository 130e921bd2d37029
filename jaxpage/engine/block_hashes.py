"""What a full block of KV is known by: a hash of everything that shapes its content.

Hashes are chained: a block's hash depends on the one before it, on its tokens, and on its extra keys. Whatever else a
request brings that shapes its KV (embeddings instead of tokens, say) becomes an extra key of the blocks it touches.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import cache

import numpy as np

from jaxpage.interventions import block_keys
from jaxpage.request import Request, Sequence


@cache
def root_hash(weight_epoch: int) -> bytes:
    """Parent of every first block. Other weights make other KV, so their epoch starts the chain."""
    return hashlib.sha256(b"jaxpage kv block, weight epoch %d" % weight_epoch).digest()


def hash_block(parent: bytes, token_ids: Items[int], extra: tuple[str, ...] = ()) -> bytes:
    """sha256 of a full block: what precedes it (`parent`), its tokens, its extra keys.

    Equal in every process; a block's hash changes if any token up to its end does. `repr` of a
    tuple of strings is one to one, and so is the whole: `parent` has 32 bytes and all blocks of a
    pool have equally many tokens.
    """
    content = parent + _packer(len(token_ids))(*token_ids)
    if extra:
        content += repr(extra).encode()
    return hashlib.sha256(content).digest()


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Twice as fast as an `array` of a list."""
    return struct.Struct(f"{num_tokens}i").pack


def group_key(block_hash: bytes, group: int) -> bytes:
    """What a KV-cache group registers its block of that content under: each has a block of its own for it."""
    return block_hash if group == 0 else bytes([group]) + block_hash


def extra_keys(request: Request, start: int, end: int) -> tuple[str, ...]:
    """What besides its tokens shapes the KV of the block with tokens `start .. end` of a request.

    Salt and adapter are keys of the first block only: the chain carries them on. A key says what kind it is, so that
    none can be taken for another.
    """
    keys = []
    if start == 0 and request.adapter is not None:
        keys.append(f"adapter {request.adapter.key}")
    if start == 0 and request.cache_salt is not None:
        keys.append(f"salt {request.cache_salt}")
    if request.prompt_embeds is not None and start < len(request.prompt_embeds):
        keys.append(f"embeds {_hash_array(request.prompt_embeds[start:end])}")
    if request.pictures is not None:
        for picture, first, _ in request.pictures.within(start, end):
            keys.append(f"picture {picture.content_hash.hex()} {first - start}")
    if request.params.interventions:
        prompt_len = len(request.prompt_token_ids)
        keys += block_keys(request.params.interventions, prompt_len, start, end)
    return tuple(keys)


def extend_hashes(sequence: Sequence, count: int, block_size: int, weight_epoch: int) -> None:
    """Complete `sequence.block_hashes` to its first `count` blocks."""
    hashes, tokens, request = sequence.block_hashes, sequence.token_ids, sequence.request
    sources = (request.cache_salt, request.prompt_embeds, request.pictures, request.adapter)
    has_keys = any(source is not None for source in sources) or request.params.interventions
    for start in range(len(hashes) * block_size, count * block_size, block_size):
        end = start + block_size
        parent = hashes[-1] if hashes else root_hash(weight_epoch)
        extra = extra_keys(request, start, end) if has_keys else ()
        hashes.append(hash_block(parent, tokens[start:end], extra))


def _hash_array(array: np.ndarray) -> str:
    header = f"{array.dtype.name} {array.shape} ".encode()
    return hashlib.sha256(header + array.tobytes()).hexdigest()
