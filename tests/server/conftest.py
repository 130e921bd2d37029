"""One server of the demo's model for all tests of this folder, on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpage.async_llm import AsyncLLM
from jaxpage.demo import checkpoint
from jaxpage.server.options import ServerOptions
from jaxpage.server.run import bind, make_http
from tests.few_programs import few_programs


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    with few_programs():
        llm = AsyncLLM(
            str(checkpoint()),
            dtype="float32",  # in which a CPU multiplies sooner
            max_num_seqs=8,
            max_num_batched_tokens=64,
            decode_steps=1,  # a program less to compile, of which HTTP shows nothing
            kv_cache_memory_bytes="64M",
            tool_call_parser="hermes",
        )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def compact(llm) -> dict[str, Any]:
    """What keeps the model from writing spaces where a schema lets it."""
    vocabulary = llm.get_tokenizer().get_vocab()
    decode = llm.get_tokenizer().decode
    return {"logit_bias": {str(i): -100 for i in vocabulary.values() if decode([i]).isspace()}}


@contextlib.contextmanager
def serving(llm: AsyncLLM, **options) -> Iterator[str]:
    """The URL of a server of this engine, which lives on when the server ends."""
    options = ServerOptions(port=0, shutdown_timeout=0.0, **options)
    bound = bind(options)
    bound.listen()  # who comes before the server is up waits
    http = make_http(Lasting(llm), options)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve([bound])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


class Lasting:
    """An engine that a server cannot shut down."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm

    def __getattr__(self, name: str):
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="session")
def url(llm) -> Iterator[str]:
    with serving(llm, served_model_name=("demo", "other-name")) as url:
        yield url
