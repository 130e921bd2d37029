from types import SimpleNamespace

import pytest

from jaxpage.runner import memory


def device(stats):
    return SimpleNamespace(memory_stats=lambda: stats)


def test_an_accelerator_gives_its_share_less_what_is_in_use():
    chip = device({"bytes_limit": 1000, "bytes_in_use": 300})
    assert memory.pool_bytes([chip], utilization=0.92, temp_bytes=50) == 920 - 300 - 50


def test_lmdeploys_share_is_of_what_use_and_temporaries_leave():
    chip = device({"bytes_limit": 1000, "bytes_in_use": 300})
    sized = memory.pool_bytes([chip], utilization=0.92, temp_bytes=50, share_of_free=0.8)
    assert sized == 0.8 * (1000 - 300 - 50)


@pytest.mark.parametrize("share_of_free", [None, 0.5])
def test_the_device_with_the_least_memory_decides(share_of_free):
    free = [{"bytes_limit": 1000, "bytes_in_use": used} for used in (100, 400, 200)]
    options = {"utilization": 0.9, "temp_bytes": 10, "share_of_free": share_of_free}
    sizes = [memory.pool_bytes([device(stats)], **options) for stats in free]
    assert memory.pool_bytes([device(stats) for stats in free], **options) == min(sizes) == sizes[1]


def test_a_cpu_gives_a_share_of_the_free_ram_and_never_much_unless_told(monkeypatch):
    def sized(temp_bytes, **options):
        return memory.pool_bytes([device(None)], utilization=0.92, temp_bytes=temp_bytes, **options)

    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 30)
    assert sized(1000) == (1 << 28) - 1000
    assert sized(1000, share_of_free=0.5) == (1 << 29) - 500
    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 40)
    assert sized(0) == 4 << 30
    assert sized(0, share_of_free=0.5) == 1 << 39


def test_free_ram_is_plausible():
    assert 1 << 26 < memory.free_ram() < 1 << 45


def test_the_error_names_the_largest_length_that_fits():
    footprint = room_of(tokens=64)
    memory.check_fits(footprint, num_blocks=11, max_model_len=160, available=0)
    with pytest.raises(ValueError, match="largest max_model_len that fits is 160"):
        memory.check_fits(footprint, num_blocks=11, max_model_len=161, available=0)


def test_groups_with_windows_let_longer_sequences_fit():
    # Of any sequence a window of 33 needs (32 + 64) / 16 + 1 = 7 blocks at most, so 50 are left for the other group.
    footprint = room_of(tokens=64, windows=(33, None))
    memory.check_fits(footprint, num_blocks=58, max_model_len=800, available=0)
    with pytest.raises(ValueError, match="needs 58 KV blocks .* that fits is 800"):
        memory.check_fits(footprint, num_blocks=58, max_model_len=801, available=0)
    assert room_of(tokens=64, windows=(33,)).longest(10**6, num_blocks=8) == 10**6


def room_of(tokens, windows=(None,)):
    return memory.SequenceFootprint(windows=windows, block_size=16, max_num_batched_tokens=tokens)


def size(available, temp_per_token=0, **options):
    measured = []

    def temp_bytes(bucket):
        measured.append(bucket.num_tokens)
        return temp_per_token * bucket.num_tokens

    sizes = {"max_model_len": 320, "must_fit": True, "max_num_seqs": 2} | options
    num_blocks, footprint = memory.size_pool(
        available=lambda temp: available - temp,
        temp_bytes=temp_bytes,
        bytes_per_block=100,
        footprint=room_of(tokens=1024),
        **sizes,
    )
    return (num_blocks, footprint.max_num_batched_tokens), measured


def test_plenty_of_memory_gives_what_the_rows_can_fill_and_measures_nothing():
    assert size(10_000) == ((41, 1024), [])


def test_the_pool_gets_what_the_largest_step_leaves():
    assert size(4_000, temp_per_token=1) == ((29, 1024), [1024])


def test_the_largest_step_is_halved_until_one_sequence_fits():
    # 1024 tokens leave no block, 512 leave 14, 256 leave 27: 20 and the null block fit.
    assert size(4_000, temp_per_token=5) == ((27, 256), [1024, 512, 256])


def test_the_largest_step_is_halved_until_16_blocks_fit_however_short_the_sequences():
    short = {"max_model_len": 32, "max_num_seqs": 20}
    # 14 blocks would do for a sequence of 2, and are fewer than 16.
    assert size(4_000, temp_per_token=5, **short) == ((27, 256), [1024, 512, 256])
    assert size(1_700, temp_per_token=0, **short) == ((17, 1024), [1024])


def test_a_pool_that_all_rows_can_never_fill_to_16_blocks_needs_no_smaller_step():
    tiny = {"max_model_len": 32, "max_num_seqs": 4}
    assert size(1_200, temp_per_token=0, **tiny) == ((9, 1024), [1024])


def test_when_nothing_helps_the_blocks_that_fit_are_reported():
    (num_blocks, tokens), _ = size(900, temp_per_token=1)
    assert (num_blocks, tokens) == (8, 64)


def test_what_is_not_free_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 10 * 10**9)
    chip = device({"bytes_limit": 5 * 10**9, "bytes_in_use": 10**9})
    cpu = device(None)
    chip.platform, cpu.platform = "gpu", "cpu"
    memory.check_room([chip], pool_bytes=4 * 10**9, host_bytes=10 * 10**9)
    memory.check_room([cpu], pool_bytes=4 * 10**9, host_bytes=6 * 10**9)
    with pytest.raises(ValueError, match="would take 4.10 GB, but gpu has 4.00 GB free"):
        memory.check_room([chip], pool_bytes=41 * 10**8, host_bytes=0)
    with pytest.raises(ValueError, match="takes 6.10 GB of RAM, of which 6.00 GB are free beside"):
        memory.check_room([cpu], pool_bytes=4 * 10**9, host_bytes=61 * 10**8)
