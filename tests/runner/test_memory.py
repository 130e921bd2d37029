from types import SimpleNamespace

import pytest

from jaxpage.runner import memory


def device(stats):
    return SimpleNamespace(memory_stats=lambda: stats)


def test_an_accelerator_gives_its_share_less_what_is_in_use():
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    assert memory.pool_bytes(device(stats), utilization=0.92, temp_bytes=50) == 920 - 300 - 50


def test_a_cpu_gives_a_share_of_the_free_ram_and_never_much(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 30)
    assert memory.pool_bytes(device(None), utilization=0.92, temp_bytes=1000) == (1 << 28) - 1000
    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 40)
    assert memory.pool_bytes(device(None), utilization=0.92, temp_bytes=0) == 4 << 30


def test_free_ram_is_plausible():
    assert 1 << 26 < memory.free_ram() < 1 << 45


def test_the_error_names_the_largest_length_that_fits():
    memory.check_fits(num_blocks=11, block_size=16, max_model_len=160, available=0)
    with pytest.raises(ValueError, match="largest max_model_len that fits is 160"):
        memory.check_fits(num_blocks=11, block_size=16, max_model_len=161, available=0)


def size(available, temp_per_token=0):
    measured = []

    def temp_bytes(bucket):
        measured.append(bucket.num_tokens)
        return temp_per_token * bucket.num_tokens

    sized = memory.size_pool(
        available=lambda temp: available - temp,
        temp_bytes=temp_bytes,
        bytes_per_block=100,
        num_blocks_per_row=10,
        num_blocks_wanted=10,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
    )
    return sized, measured


def test_plenty_of_memory_gives_what_the_rows_can_fill_and_measures_nothing():
    assert size(10_000) == ((41, 1024), [])


def test_the_pool_gets_what_the_largest_step_leaves():
    assert size(4_000, temp_per_token=1) == ((29, 1024), [1024])


def test_the_largest_step_is_halved_until_one_sequence_fits():
    assert size(4_000, temp_per_token=10) == ((14, 256), [1024, 512, 256])


def test_when_nothing_helps_the_blocks_that_fit_are_reported():
    (num_blocks, tokens), _ = size(900, temp_per_token=1)
    assert (num_blocks, tokens) == (8, 64)
