"""The identity of a full KV block: a hash of everything that determines its content.

Hashes are chained: a block's hash depends on the block before it, its tokens and its extra keys. Anything else in a
request that changes its KV (embeddings instead of tokens, for example) becomes an extra key of the blocks it affects.
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
    """Parent of every first block. KV depends on the weights, so the chain starts with their epoch."""
    return hashlib.sha256(b"jaxpage kv block, weight epoch %d" % weight_epoch).digest()


def hash_block(parent: bytes, token_ids: Items[int], extra: tuple[str, ...] = ()) -> bytes:
    """sha256 of a full block: the hash of the block before it (`parent`), its tokens, its extra keys.

    Equal in every process. It changes if any token up to the end of the block does. The encoding is injective: `repr`
    of a tuple of strings is, `parent` has 32 bytes, and all blocks of a pool have the same number of tokens.
    """
    content = parent + _packer(len(token_ids))(*token_ids)
    if extra:
        content += repr(extra).encode()
    return hashlib.sha256(content).digest()


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Packs int32s, twice as fast as making an `array` of a list."""
    return struct.Struct(f"{num_tokens}i").pack


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key of a block in the prefix cache: each KV-cache group has its own block for the same tokens."""
    return block_hash if group == 0 else bytes([group]) + block_hash


def extra_keys(request: Request, start: int, end: int) -> tuple[str, ...]:
    """What determines the KV of the block of tokens `start .. end` besides these tokens.

    Salt and adapter are keys of the first block only, since hashes are chained. Each key begins with its kind, so that
    keys of different kinds never collide.
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
    """Extend `sequence.block_hashes` to its first `count` blocks."""
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
