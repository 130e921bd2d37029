"""The options of an engine that are about pictures: what may be in a prompt, and from where it may be read.

Knows vLLM's names and forms of them. Must not know how anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = ("image", "video")
MOST = 999  # pictures of a kind in a prompt, unless the user says; vLLM's number


def check_picture_options(
    limit_mm_per_prompt: Any, mm_processor_kwargs: Any, allowed_media_domains: Any
) -> None:
    """Raise ValueError for values of these options that mean nothing."""
    for kind in KINDS:
        most_of(limit_mm_per_prompt, kind)
    unknown = [kind for kind in limit_mm_per_prompt or {} if kind not in (*KINDS, "audio")]
    if unknown:
        raise ValueError(f"limit_mm_per_prompt has {unknown[0]!r}; known are {', '.join(KINDS)}")
    if not isinstance(mm_processor_kwargs, dict | None):
        raise ValueError(f"mm_processor_kwargs must be a dict, got {mm_processor_kwargs!r}")
    if not all(isinstance(domain, str) and domain for domain in allowed_media_domains):
        raise ValueError(
            f"allowed_media_domains must be names of hosts, got {allowed_media_domains!r}"
        )


def most_of(limit_mm_per_prompt: Any, kind: str) -> int:
    """How many of a kind a prompt may have, by a dict such as {"image": 4, "video": {"count": 1}}.

    Raises ValueError for anything else.
    """
    if limit_mm_per_prompt is not None and not isinstance(limit_mm_per_prompt, Mapping):
        raise ValueError(
            f'limit_mm_per_prompt must be a dict such as {{"image": 4}}, got {limit_mm_per_prompt!r}'
        )
    most = (limit_mm_per_prompt or {}).get(kind, MOST)
    if isinstance(most, Mapping):  # vLLM's other form; sizes in it are for its profiling
        most = most.get("count", MOST)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise ValueError(f"limit_mm_per_prompt must have numbers from 0, got {kind}={most!r}")
    return most
