"""What is made of the compiler's numbers before they are an estimate."""

from __future__ import annotations

from jaxpage.aot.worker import largest_step_bytes


def program(temp_bytes: int, result_bytes: int) -> dict[str, int]:
    return {"temp_bytes": temp_bytes, "result_bytes": result_bytes}


def test_a_decode_step_needs_its_layers_and_its_sampler():
    # layers, forward, sample. 100 + 1000, and two results of 8 steps each.
    found = largest_step_bytes([program(100, 7), program(300, 20), program(1000, 5)], 8)
    assert found == 1100 + 2 * 8 * 5


def test_a_step_with_prompts_needs_the_larger_of_its_programs():
    found = largest_step_bytes([program(100, 7), program(3000, 20), program(1000, 5)], 1)
    assert found == 3000 + 2 * (20 + 5)


def test_nothing_compiled_needs_nothing():
    assert largest_step_bytes([], 8) == 0
