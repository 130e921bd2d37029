"""Tile sizes chosen by compiled schedules, for a TPU that is not there."""

from __future__ import annotations

import json

import pytest

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import missing_compiler
from jaxpage.aot.tune import tune_for
from pallas_kernels import tile_sizes, tuning
from pallas_kernels.paged_attention.tpu_shape import TileSizes


@pytest.mark.aot
def test_the_better_of_two_candidates_is_written(tmp_path):
    if reason := missing_compiler("tpu"):
        pytest.skip(reason)
    target = parse_target("v6e:2x2")
    candidates = {"decode": {"tile_kv": [512, 2048]}, "prefill": {"tile_rows": [128]}}
    path = tune_for(target, tmp_path, candidates)
    content = json.loads(path.read_text())
    assert list(content["seconds"]) == ["tile_kv=512", "tile_kv=2048", "tile_rows=128"]
    # Short rows leave most of a tile of 2,048 keys empty.
    assert tuning.EQUAL * content["seconds"]["tile_kv=512"] < content["seconds"]["tile_kv=2048"]
    assert content["source"].startswith("compiled schedules, libtpu ")
    assert tile_sizes.tuned_sizes(
        "paged_attention", "tpu", target.chip.device_kind, tmp_path
    ) == TileSizes(tile_rows=128)
    # A tenth to ten times what the bytes of 64 rows with 4,096 keys of 8 heads take.
    at_best = 64 * 4096 * 2 * 8 * 128 * 2 / target.chip.bytes_per_second
    assert 0.1 * at_best < content["seconds"]["tile_kv=512"] < 10 * at_best


def test_what_a_device_has_measured_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpage.aot.tune.missing_compiler", lambda platform: None)
    tile_sizes.write("TPU v6 lite", TileSizes(), {}, tmp_path)
    with pytest.raises(ValueError, match="was measured on a device"):
        tune_for(parse_target("v6e:2x2"), tmp_path)


def test_gpus_have_no_schedule(tmp_path):
    with pytest.raises(ValueError, match="h200 is not a TPU"):
        tune_for(parse_target("h200"), tmp_path)
