"""Block contents between device, host and disk: bit for bit, and damaged files are never served."""

from __future__ import annotations

import hashlib
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.kv_pool import KVPoolSpec
from jaxpage.runner.block_store import BlockStore, fingerprint
from jaxpage.runner.calls import BLOCKS_PER_CALL
from jaxpage.runner.host_memory import (
    HostMemory,
    content_shapes,
    content_shardings,
    read_blocks,
    write_blocks,
)
from jaxpage.runner.pack import padded, portions

slow = partial(pytest.param, marks=pytest.mark.slow)


def random_pool(spec, seed=0):
    rng = np.random.default_rng(seed)
    leaves, treedef = jax.tree.flatten(spec.abstract())
    bits = [rng.integers(0, 256, x.shape + (x.dtype.itemsize,), np.uint8) for x in leaves]
    arrays = [b.view(x.dtype).reshape(x.shape) for b, x in zip(bits, leaves, strict=True)]
    return jax.device_put(jax.tree.unflatten(treedef, arrays))


def spec_of(kv_format):
    return KVPoolSpec(
        num_arrays=2,
        num_blocks=30,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=jnp.dtype(jnp.bfloat16),
        format=kv_format,
    )


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("kv_format", [None, "int4", slow("int8"), slow("fp8_e4m3")])
def test_blocks_come_back_bit_for_bit(kv_format, pinned):
    """Pinned: as for an accelerator; a CPU has such a memory too."""
    spec = spec_of(kv_format)
    pool, memory = (
        random_pool(spec),
        HostMemory(20, shardings=content_shardings(spec, None) if pinned else None),
    )
    out = [(1 + i, 20 - i) for i in range(20)]  # (device block, host block)
    read = jax.jit(partial(read_blocks, spec, None))
    for block_ids, host_ids in portions(out):
        assert len(block_ids) <= BLOCKS_PER_CALL
        put_all(memory, host_ids, read(pool, padded(block_ids)))
    assert all(lies_pinned(memory, host_id) == pinned for host_id in range(1, 21))
    back = [(host_id, block_id + 9) for block_id, host_id in out]
    moved, write = pool, jax.jit(partial(write_blocks, spec, None))
    for host_ids, block_ids in portions(back):
        moved = write(moved, padded(block_ids), memory.contents(host_ids))
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (pool, moved))
    for old, new in zip(*leaves, strict=True):
        assert same_bits(old[1:21], new[10:30]) and same_bits(old[1:10], new[1:10])


def put_all(memory, host_ids, contents):
    assert len(contents) == BLOCKS_PER_CALL
    for host_id, content in zip(host_ids, contents, strict=False):
        memory.put(host_id, content)


def lies_pinned(memory, host_id):
    (kind,) = {array.sharding.memory_kind for array in memory._contents[host_id]}
    return kind == "pinned_host"


def test_the_last_content_given_to_a_host_block_counts():
    spec = spec_of(None)
    pool, memory = random_pool(spec), HostMemory(3)
    for block_id in (5, 6):
        put_all(memory, [2], read_blocks(spec, None, pool, jnp.asarray(padded([block_id]))))
    arrays, kept = [np.asarray(array) for array in pool], np.asarray(memory.get(2)[0])
    assert same_bits(kept[0], arrays[0][6])
    assert same_bits(kept[1], arrays[1][6])
    from_disk = [np.stack([array[8] for array in arrays])]
    memory.put(2, from_disk)
    assert same_bits(memory.get(2)[0], from_disk[0])
    assert [(x.shape, x.dtype) for x in from_disk] == [
        (x.shape, x.dtype) for x in content_shapes(spec)
    ]


def store_in(folder):
    return BlockStore(folder, [(4, 2), (3,)], [np.dtype(np.uint16), np.dtype(np.float32)])


CONTENT = [np.arange(8, dtype=np.uint16).reshape(4, 2), np.ones(3, np.float32)]
HASH, OTHER = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_stored_block_is_found_by_another_store(tmp_path):
    store_in(tmp_path / "x").save(HASH, CONTENT)
    found = store_in(tmp_path / "x").load(HASH)
    assert all(np.array_equal(a, b) for a, b in zip(found, CONTENT, strict=True))
    assert store_in(tmp_path / "x").load(OTHER) is None
    assert store_in(tmp_path / "y").load(HASH) is None  # other weights


def test_a_folder_of_someone_else_is_neither_read_nor_written(tmp_path, monkeypatch):
    store = store_in(tmp_path)

    def refuse(*_, **__):
        raise PermissionError("a folder of another user")

    for name in ("exists", "stat", "mkdir", "read_bytes"):
        monkeypatch.setattr(type(tmp_path), name, refuse)
    store.save(HASH, CONTENT)
    assert store.load(HASH) is None


@pytest.mark.parametrize("damage", ["torn", "longer", "flipped", "empty", "renamed", "foreign"])
def test_a_damaged_block_is_not_served_and_can_be_written_again(tmp_path, damage):
    store = store_in(tmp_path)
    store.save(HASH, CONTENT)
    (path,) = files_in(tmp_path)
    data, wanted = path.read_bytes(), HASH
    if damage == "renamed":
        wanted = OTHER
        target = path.parent.parent / OTHER.hex()[:2] / OTHER.hex()
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    else:
        flipped = bytes([data[0] ^ 1]) + data[1:]
        path.write_bytes(
            {
                "torn": data[: len(data) // 2],
                "longer": data + b"x",
                "flipped": flipped,
                "empty": b"",
                "foreign": b"something else entirely",
            }[damage]
        )
    assert store.load(wanted) is None and files_in(tmp_path) == []
    store.save(wanted, CONTENT)
    assert store.load(wanted) is not None


def test_a_full_disk_is_said_once_and_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    store = store_in(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    store.save(HASH, CONTENT)
    store.save(OTHER, CONTENT)
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1
    assert files_in(tmp_path) == [] and store.load(HASH) is None


def test_the_fingerprint_tells_weights_and_facts_apart():
    weights = [np.ones((2, 3), np.float32), np.zeros(4, np.int8)]
    base = fingerprint(["qwen"], weights)
    assert base == fingerprint(["qwen"], [w.copy() for w in weights]) and len(base) == 32
    changed = [weights[0].copy(), weights[1]]
    changed[0][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert base != fingerprint(["qwen"], changed) != fingerprint(["llama"], weights)
