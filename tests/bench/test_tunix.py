"""The comparison with Tunix's sampler: what is asked and what is counted, without Tunix."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpage.bench import tunix
from jaxpage.bench.tunix import TunixBench


def test_members_of_a_group_have_one_prompt():
    prompts = tunix._prompts(TunixBench(group_size=3, input_len=5), random.Random(0), 2)
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    ids = tunix._Ids().encode(prompts[0])
    assert len(ids) == 4 and min(ids) >= 3  # Tunix puts BOS before them


def test_the_stop_token_that_tunix_drops_is_counted():
    output = SimpleNamespace(tokens=[np.zeros(3), np.zeros(8)])
    bench = TunixBench(output_len=8)
    assert tunix._num_tokens(bench, tunix._VANILLA, output) == 12
    assert tunix._num_tokens(bench, tunix._JAXPAGE, output) == 11


def test_the_table_has_both_engines_and_their_ratio():
    found = {
        "rate": 100.0,
        "tokens": 5,
        "mismatched": 0.5,
        "max_abs": 1e-6,
        "update_ms": 1.0,
        "kv_bytes": 2e6,
    }
    engines = {tunix._VANILLA: found, tunix._JAXPAGE: found | {"rate": 250.0}}
    size = {"groups": 8, "group_size": 4, "engines": engines, "ratio": 2.5}
    text = tunix.show({"sizes": [size], "strict": {"tokens": 64, "mismatches": 0}})
    lines = text.splitlines()
    assert lines[1].split()[-7:] == ["100", "5", "50", "%", "1.0e-06", "1.00", "2"]
    assert lines[3].split() == ["8x4", "ratio", "2.50"]
    assert lines[4].endswith("0 of 64 logprobs differ from the trainer's")


def test_sizes_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match="--groups must be at least 1, got 0"):
        tunix.measure(TunixBench(groups=(0,)))
