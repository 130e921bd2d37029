"""Keys of prefixes: requests with equal prefixes have equal keys.

Knows the fields of OpenAI's API and of Anthropic's. Nothing is tokenized: prefixes are compared as characters of the
request.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from jaxpage.server.protocol.message_blocks import is_billing

BLOCK_LEN = 256  # characters
MAX_BLOCKS = 256  # per request; the rest is ignored

# In the order of a chat template. The salt is first, because it divides the prefix cache.
_FIELDS = (
    *("cache_salt", "instructions", "system", "tools"),
    *("messages", "prompt", "input", "token_ids"),
)


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """A key for each full block of a request's prefix; each depends on all blocks before it.

    Empty if the body is not a JSON object, or too short to matter.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(request, dict):
        return ()
    request["system"] = _without_billing(request.get("system"))
    parts = [json.dumps(request[name]) for name in _FIELDS if request.get(name)]
    text = "".join(parts)[: BLOCK_LEN * MAX_BLOCKS].encode()
    keys, key = [], b""
    for start in range(0, len(text) - BLOCK_LEN + 1, BLOCK_LEN):
        key = blake2b(key + text[start : start + BLOCK_LEN], digest_size=8).digest()
        keys.append(key)
    return tuple(keys)


def _without_billing(system: Any) -> Any:
    """Anthropic's system prompt without the block that the server leaves out."""
    if not isinstance(system, list):
        return system
    return [b for b in system if not (isinstance(b, dict) and is_billing(b.get("text")))]
