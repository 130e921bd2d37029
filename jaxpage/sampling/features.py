"""All sampler features in the order in which they act (vLLM's), their bits, and what a request asks of them.

Those that every engine has are in FEATURES. An engine's processors come on top: programs pay for one only in engines
that were started with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.sampling.constraints import CONSTRAINTS
from jaxpage.sampling.fields import Processors, SamplerFeature, SlotField
from jaxpage.sampling.keys import RANDOM
from jaxpage.sampling.logprobs import LOGPROBS, TOP_LOGPROBS
from jaxpage.sampling.penalties import PENALTIES
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling.truncation import TRUNCATION

if TYPE_CHECKING:
    from jaxpage.config import ResolvedConfig
    from jaxpage.request import Request

BEFORE_ARGMAX = (CONSTRAINTS, PENALTIES)  # they act on greedy rows too
_AFTER = (RANDOM, TRUNCATION, LOGPROBS, TOP_LOGPROBS)
FEATURES: tuple[SamplerFeature, ...] = (*BEFORE_ARGMAX, *_AFTER)
FIELDS: tuple[SlotField, ...] = tuple(f for feature in FEATURES for f in feature.fields)

ASKED = "asked_processors"  # a field: the bits of the processors that a request asks for

_BITS = {feature.name: 1 << index for index, feature in enumerate(FEATURES)}


def bits(*features: SamplerFeature) -> int:
    """The union of their bits in `StepPlan.features`."""
    return sum({_BITS[feature.name] for feature in features})


def processors_of(config: ResolvedConfig) -> Processors:
    """What an engine's sampler has besides FEATURES: thinking budgets if it knows markers, and its user's parts."""
    thinking = () if config.reasoning_config is None else (THINKING,)
    return (*thinking, *config.logits_processors)


def processor_bits(processors: Processors) -> list[int]:
    """The bits of an engine's processors, behind those of FEATURES."""
    return [1 << (len(FEATURES) + index) for index in range(len(processors))]


def fields_of(processors: Processors) -> tuple[SlotField, ...]:
    """The fields of the sampler and of an engine's processors, with one that says which of these are asked for."""
    own = (*(field for processor in processors for field in processor.fields),)
    asked = SlotField(name=ASKED, value=lambda request, _: _asked_of(request, processors))
    return (*FIELDS, *own, asked) if processors else FIELDS


def _asked_of(request: Request, processors: Processors) -> int:
    own = zip(processors, processor_bits(processors), strict=True)
    return sum(bit for processor, bit in own if processor.asked(request))


def features_of(request: Request, processors: Processors = ()) -> int:
    """The bits of all features that a request asks for."""
    return _asked_of(request, processors) | bits(
        *(feature for feature in FEATURES if feature.asked(request))
    )


def slot_fields_of(
    request: Request, vocab_size: int, processors: Processors = ()
) -> dict[str, Any]:
    """The values of all fields that a request sets, by name; the others keep their fill value.

    Raises ValueError for a value that does not fit the field of a processor.
    """
    values = {field.name: field.value(request, vocab_size) for field in fields_of(processors)}
    for field in (field for processor in processors for field in processor.fields):
        if values[field.name] is not None:
            values[field.name] = _fitted(field, values[field.name], vocab_size)
    return {name: value for name, value in values.items() if value is not None}


def _fitted(field: SlotField, value: Any, vocab_size: int) -> np.ndarray:
    """A value that a user's code chose, as an array of the field. Raises ValueError."""
    array = np.empty(field.shape(vocab_size), field.dtype)
    try:
        array[...] = value
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"the value of a logits processor's field {field.name!r} must be {field.dtype} of shape {array.shape}, got "
            f"{value!r:.200}: {error}"
        ) from None
    return array
