"""How requests begin: keys that are equal for requests that begin alike.

Knows the fields of OpenAI's API. Nothing is tokenised: beginnings are compared as characters of the request.
"""

from __future__ import annotations

import json
from hashlib import blake2b

BLOCK_LEN = 256  # characters
MAX_BLOCKS = 256  # of one request; what follows is not looked at

# In the order in which a chat template puts them, and a salt before all, as it divides the prefix cache.
_FIELDS = ("cache_salt", "instructions", "tools", "messages", "prompt", "input", "token_ids")


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """A key for each whole block of a request's beginning; each depends on all blocks before it.

    Empty for what is no JSON object, or too short to be worth it.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(request, dict):
        return ()
    parts = [json.dumps(request[name]) for name in _FIELDS if request.get(name)]
    text = "".join(parts)[: BLOCK_LEN * MAX_BLOCKS].encode()
    keys, key = [], b""
    for start in range(0, len(text) - BLOCK_LEN + 1, BLOCK_LEN):
        key = blake2b(key + text[start : start + BLOCK_LEN], digest_size=8).digest()
        keys.append(key)
    return tuple(keys)
