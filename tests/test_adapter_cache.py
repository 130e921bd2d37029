"""Adapters in host memory: read once, told apart by what they hold, forgotten in the order of use."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import LoRARequest
from jaxpage.adapter_cache import AdapterCache


class Folders:
    """What lies in folders, and how often each was read."""

    def __init__(self):
        self.values = {"a": 1.0, "b": 2.0, "same as a": 1.0}
        self.read = []

    def __call__(self, folder):
        self.read.append(folder)
        return [np.full((2, 3), self.values[folder], np.float32)]


def request(number, folder, **fields):
    return LoRARequest(f"adapter {number}", number, folder, **fields)


def test_one_that_is_read_again_with_other_contents_has_another_key():
    folders = Folders()
    cache = AdapterCache(folders, 2)
    before = cache.get(request(1, "a"))
    folders.values["a"] = 3.0
    assert cache.get(request(1, "a")) is before  # not read again
    after = cache.get(request(1, "a", load_inplace=True))
    assert after.key != before.key and before.arrays[0][0, 0] == 1.0
    folders.values["a"] = 1.0
    assert cache.remove(1) and not cache.remove(1)
    assert cache.get(request(1, "a")).key == before.key
    assert folders.read == ["a"] * 3


def test_equal_contents_have_equal_keys():
    cache = AdapterCache(Folders(), 3)
    keys = [cache.get(request(i, f)).key for i, f in enumerate(["a", "same as a", "b"], start=1)]
    assert keys[0] == keys[1] != keys[2]


def test_the_least_recently_used_one_is_forgotten():
    folders = Folders()
    cache = AdapterCache(folders, 2)
    for number, folder in ((1, "a"), (2, "b"), (1, "a"), (3, "same as a")):
        cache.get(request(number, folder))
    assert cache.ids == {1, 3} and folders.read == ["a", "b", "same as a"]
    assert cache.add(request(2, "b")) is cache.add(request(2, "b")) is True
    assert folders.read == ["a", "b", "same as a", "b"]


def test_an_id_names_one_adapter():
    cache = AdapterCache(Folders(), 2)
    cache.get(request(1, "a"))
    with pytest.raises(ValueError, match="lora_int_id=1 is the adapter.*load_inplace"):
        cache.get(request(1, "b"))
    for wrong in ("a", None, 5):
        for call in (cache.get, cache.add):
            with pytest.raises(ValueError, match=f"must be a LoRARequest, got {wrong!r}"):
                call(wrong)
    assert cache.ids == {1}


def test_adapters_have_vllm_s_import_path_and_names():
    from jaxpage.lora.request import LoRARequest as Imported

    adapter = request(1, "a")
    assert Imported is LoRARequest
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("adapter 1", 1, "a")
