"""The adapters that requests may ask for, in host memory: read when first asked for, the least recently used forgotten.

Knows ids, names and folders. Must not know devices, nor how a folder is read.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from jaxpage.lora_request import Adapter, LoRARequest

Read = Callable[[str], Sequence[np.ndarray]]


class AdapterCache:
    """Adapters by id. One thread at a time.

    A request holds its adapter, so whatever is removed or forgotten here, its tokens are those of the adapter that it
    was made with.
    """

    def __init__(self, read: Read, max_adapters: int):
        """`read`: a folder's weights, as a slot of the device has them; raises ValueError."""
        self._read = read
        self._max_adapters = max_adapters
        self._adapters: OrderedDict[int, Adapter] = OrderedDict()  # the least recently used first

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter that a request names, read if it is not there. Raises ValueError if it cannot be had."""
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, got {request!r}")
        number = request.lora_int_id
        known = self._adapters.get(number)
        if known is not None and not request.load_inplace:
            there = known.request
            if (there.lora_name, there.lora_path) != (request.lora_name, request.lora_path):
                raise ValueError(
                    f"lora_int_id={number} is the adapter {there.lora_name!r} of {there.lora_path}; give "
                    f"{request.lora_name!r} another id, or load_inplace=True to replace it"
                )
            self._adapters.move_to_end(number)
            return known
        arrays = tuple(self._read(request.lora_path))
        adapter = Adapter(request=request, key=_hash(arrays), arrays=arrays)
        self._adapters[number] = adapter
        self._adapters.move_to_end(number)
        while len(self._adapters) > self._max_adapters:
            self._adapters.popitem(last=False)
        return adapter

    def add(self, request: LoRARequest) -> bool:
        """Have an adapter ready. False if it was there already. Raises what `get` raises."""
        is_new = request.lora_int_id not in self._adapters or request.load_inplace
        self.get(request)
        return is_new

    def remove(self, number: int) -> bool:
        """Forget an adapter; requests that have it end with it. False if it is not there."""
        return self._adapters.pop(number, None) is not None

    @property
    def ids(self) -> set[int]:
        """Of the adapters that are there."""
        return set(self._adapters)


def _hash(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.name} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
