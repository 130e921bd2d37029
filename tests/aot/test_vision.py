"""Vision towers compiled for devices that are not there: their memory grows with the patches, not with their square."""

from __future__ import annotations

import pytest

from jaxpage.aot.pictures import temp_bytes_of_encoder
from tests.aot.compiling import missing, seen
from tests.aot.vision import CASES, TARGETS

pytestmark = pytest.mark.aot

EMBEDDING_BYTES = {"qwen2_5_vl": 2 * 2048 // 4, "gemma3": 2 * 2560 // 16}  # of a patch


@pytest.mark.parametrize("target", TARGETS)
def test_towers_compile_and_scores_are_made_tile_by_tile(target):
    if reason := missing(target):
        pytest.skip(reason)
    programs = {each["name"]: each for each in seen("vision", target).programs}
    assert set(programs) == set(CASES)
    for name, (_, num_patches) in CASES.items():
        found = programs[name]
        assert found["exchanges"] == []
        assert found["output_bytes"] == pytest.approx(
            num_patches * EMBEDDING_BYTES[name.split("-")[0]], rel=0.05
        )
        # All scores of 16,384 patches are 17 GB.
        assert found["temp_bytes"] < temp_bytes_of_encoder(num_patches), (name, found)
