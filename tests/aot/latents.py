"""Steps of models with multi-head latent attention and experts: DeepSeek-V2-Lite, also with its KV in 8 bits, and one
of its sizes as of DeepSeek-V3, whose MTP layer drafts. Each with four layers.
"""

from __future__ import annotations

import re
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
V2_LITE = DEEPSEEK_V2_LITE | {"num_hidden_layers": LAYERS}
MODELS = {
    "V2-Lite": V2_LITE,
    "V2-Lite fp8": V2_LITE,
    "MTP": V2_LITE
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
}
PLACES = (
    Place("v6e:2x2", 1, "V2-Lite"),
    Place("v5e:2x2", 4, "V2-Lite"),
    Place("v6e:2x2", 4, "MTP"),
    Place("tpu7x:2x2x1", 4, "V2-Lite fp8"),
    Place("h200", 1, "V2-Lite"),
)
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    """The largest decode step, the largest of prompts and, of an MTP layer, the largest program in which it drafts."""
    from jaxpage.runner.buckets import draft_name

    place, options = PLACES[TARGETS.index(target)], {}
    if place.whole == "MTP":
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 3}
    elif place.whole.endswith("fp8"):
        options["kv_cache_dtype"] = "fp8"
    job, names = largest_steps(place, MODELS[place.whole], **options)
    if place.whole == "MTP":
        names.append(draft_name(job.spec.config.max_num_seqs))
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
    text, size = compiled.as_text() or "", V2_LITE["hidden_size"]
    found = look(job, place.whole, name, compiled, log)
    if job.spec.pool.format is not None:  # the pool's bytes were counted in the dtype of the model
        itemsize = job.spec.pool.dtype.itemsize
        found |= {each: found[each] // itemsize for each in ("pool_bytes", "array_bytes")}
    return found | {"slices_of_experts": len(re.findall(rf"f32\[\d+,1,{size}\]", text))}
