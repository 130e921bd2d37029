"""Steps of a model with multi-head latent attention and experts: DeepSeek-V2-Lite, with four layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.aot.largest import largest_steps
from tests.aot.models import DEEPSEEK_V2_LITE
from tests.aot.program import Program
from tests.aot.steps import Place, environment, look, lower

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

__all__ = ["TARGETS", "environment", "programs"]

LAYERS = 4
MODEL = DEEPSEEK_V2_LITE | {"num_hidden_layers": LAYERS}
PLACES = (
    Place("v6e:2x2", 1, "V2-Lite"),
    Place("v5e:2x2", 4, "V2-Lite"),
    Place("h200", 1, "V2-Lite"),
)
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    place = PLACES[TARGETS.index(target)]
    job, names = largest_steps(place, MODEL)
    for name in names:
        yield Program(
            name=name,
            lower=partial(lower, job, name),
            look=partial(_look, job, place, name),
            observers=(sys.modules[__name__],),
        )


def _look(
    job: CompileJob, place: Place, name: str, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    """Also how often the results of one of each token's experts are taken out of those of all."""
    found, text = look(job, place.whole, name, compiled, log), compiled.as_text() or ""
    taken = f"f32[{found['bucket']['num_tokens']},1,{MODEL['hidden_size']}]"
    return found | {"slices_of_experts": text.count(taken)}
