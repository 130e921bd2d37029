"""Custom logits processors: user-defined parts of the sampler, compiled into every step.

    LLM(model, logits_processors=[SamplerFeature(name=..., fields=..., asked=..., apply=...)])

`apply` is a pure function of the logits of a step's rows. `fields` are values of a request that it reads by slot, for
example from `SamplingParams.extra_args`. `asked` says which requests need it. See `fields`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST = 16  # unused bits in a step's features


def check_processors(processors: Any) -> tuple:
    """The processors as a tuple. Raises ValueError for other objects, and for names that are taken."""
    is_list = isinstance(processors, Iterable) and not isinstance(processors, str | bytes)
    given: tuple[Any, ...] = tuple(processors) if is_list else (processors,)
    if not given:
        return ()
    from jaxpage.sampling.features import ASKED, FEATURES, FIELDS
    from jaxpage.sampling.fields import SamplerFeature
    from jaxpage.sampling.thinking import THINKING

    for processor in given:
        if not isinstance(processor, SamplerFeature) or processor.apply is None:
            raise ValueError(
                "logits_processors must be a list of jaxpage.sampling.fields.SamplerFeature with a function `apply`, "
                f"which is compiled into the step; got {processor!r:.200}"
            )
    if len(given) > MOST:
        raise ValueError(f"logits_processors has {len(given)} entries, the limit is {MOST}")
    names = [x.name for x in (*FEATURES, THINKING, *given)]
    fields = [f.name for x in (THINKING, *given) for f in x.fields] + [f.name for f in FIELDS]
    fields += [*_RESERVED, ASKED]
    twice = sorted(
        {x for x in names if names.count(x) > 1} | {x for x in fields if fields.count(x) > 1}
    )
    if twice:
        raise ValueError(
            f"logits_processors: the names {', '.join(twice)} are in use; choose others"
        )
    return given


# Fields of the request state that do not belong to the sampler.
_RESERVED = {
    "slot", "token_ids", "block_tables", "prompt_len", "max_len", "sequence_index", "finished", "hidden",
    "draft_hidden",
}  # fmt: skip
