"""The adapters of a server: a request selects one by its name as the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from jaxpage.async_llm import AsyncLLM
from jaxpage.lora.request import LoRARequest
from jaxpage.server.errors import ApiError
from jaxpage.server.lora_modules import parse_modules


class ServedAdapters:
    """Adapters by name. Belongs to one event loop."""

    def __init__(self, llm: AsyncLLM, modules: Sequence[str], model_names: Sequence[str]):
        """`modules`: the initial ones, see `ServerOptions.lora_modules`. Raises ValueError."""
        self._llm = llm
        self._model_names = tuple(model_names)
        self._requests: dict[str, LoRARequest] = {}
        self._last_id = 0
        self._first = parse_modules(modules, model_names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name."""
        return None if name is None else self._requests.get(name)

    async def load_first(self) -> None:
        """Load the initial adapters. Raises ValueError if one cannot be loaded."""
        first, self._first = self._first, []
        for name, path in first:
            await self._add(name, path)

    async def load(self, name: str, path: str, *, inplace: bool = False) -> None:
        """Serve another adapter.

        Raises ValueError if it cannot be loaded, ApiError if the name is taken or there is nothing at the path.
        """
        if name in self._model_names or (name in self._requests and not inplace):
            raise ApiError(
                400,
                f"{name!r} is served already; unload it, or send load_inplace=true",
                param="lora_name",
            )
        try:
            await self._add(name, path)
        except (ValueError, OSError) as error:
            # Unlike Path.exists, this does not raise OSError if the path is too long to exist.
            if await asyncio.to_thread(os.path.exists, path):
                raise
            raise ApiError(404, str(error), param="lora_path") from None

    async def unload(self, name: str) -> None:
        """Stop serving it; running requests keep it. Raises ApiError 404 for an unknown name."""
        if name not in self._requests:
            raise ApiError(404, f"there is no adapter {name!r}", param="lora_name")
        request = self._requests.pop(name)
        await self._llm.remove_lora(request.lora_int_id)

    async def _add(self, name: str, path: str) -> None:
        # A new id, so that the folder is read again.
        self._last_id += 1
        request = LoRARequest(name, self._last_id, path)
        await self._llm.add_lora(request)
        replaced = self._requests.get(name)
        self._requests[name] = request
        if replaced is not None:
            await self._llm.remove_lora(replaced.lora_int_id)
