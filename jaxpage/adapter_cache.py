"""The cache of adapters in host memory: read at their first use, evicted when least recently used.

Knows ids, names and folders. Must not know devices, or how a folder is read.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from jaxpage.lora.request import Adapter, LoRARequest

Read = Callable[[str], Sequence[np.ndarray]]


class AdapterCache:
    """Adapters by id. Not thread-safe.

    A request holds its adapter, so it keeps the one it was created with, whatever is removed or evicted here.
    """

    def __init__(self, read: Read, max_adapters: int):
        """`read`: reads a folder's weights in the layout of an adapter slot; raises ValueError."""
        self._read = read
        self._max_adapters = max_adapters
        self._adapters: OrderedDict[int, Adapter] = OrderedDict()  # the least recently used first

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter that a request names, read if it is not cached. Raises ValueError if it cannot be loaded."""
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
        """Load an adapter, unless it is loaded. Always True, as in vLLM. Raises like `get`."""
        self.get(request)
        return True

    def remove(self, number: int) -> bool:
        """Remove an adapter; requests that use it keep it until they end. False if it is not loaded."""
        return self._adapters.pop(number, None) is not None

    @property
    def ids(self) -> set[int]:
        """Ids of the loaded adapters."""
        return set(self._adapters)


def _hash(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.name} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
