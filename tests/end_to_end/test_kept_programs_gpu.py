"""Programs compiled for an H200 without one, on an H200."""

from __future__ import annotations

import json

import jax
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.aot.compile import compile_for
from jaxpage.aot.targets import parse_target
from tests.aot.tiny import CONFIG

pytestmark = pytest.mark.gpu

OPTIONS = dict(
    load_format="dummy",
    skip_tokenizer_init=True,
    generation_config="vllm",
    max_model_len=512,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


def test_programs_made_ahead_are_loaded_and_compute_what_those_made_here_do(tmp_path):
    assert jax.local_devices()[0].device_kind == "NVIDIA H200"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = OPTIONS | {"model": str(tmp_path)}
    compile_for(options, tmp_path / "ahead", parse_target("h200"))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = {}
    for cache in ("ahead", "here"):
        llm = LLM(**options, compilation_cache_dir=str(tmp_path / cache))
        output = llm.generate([list(range(3, 40))], params, use_tqdm=False)[0].outputs[0]
        llm.wait_until_warm()
        origins = {p.origin for p in llm.programs() if p.origin}
        found[cache] = (origins, output.token_ids)
    assert found["ahead"][0] == {"stored"} and found["here"][0] <= {"compiled", "cached"}
    assert found["ahead"][1] == found["here"][1]
