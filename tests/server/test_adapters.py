"""A server with adapters: chosen by name, loaded and unloaded at run time."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxpage import LoRARequest, SamplingParams
from jaxpage.async_llm import AsyncLLM
from jaxpage.demo import checkpoint
from jaxpage.server.adapters import ServedAdapters
from jaxpage.server.errors import ApiError
from tests.adapters import save_adapter
from tests.few_programs import few_programs
from tests.server.conftest import serving
from tests.server.test_operation import ask, error_of


class FakeLLM:
    """Knows adapters by id."""

    def __init__(self):
        self.loaded: dict[int, LoRARequest] = {}

    async def add_lora(self, request):
        if request.lora_path.startswith("broken"):
            raise ValueError("broken is not a folder")
        self.loaded[request.lora_int_id] = request
        return True

    async def remove_lora(self, number):
        return self.loaded.pop(number, None) is not None


def served(*modules):
    return ServedAdapters(FakeLLM(), modules, ("model",))


def run(coroutine):
    """Of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def test_adapters_to_begin_with():
    adapters = served("a=folder/a", '{"name": "b", "path": "folder=b", "base_model_name": "x"}')
    assert adapters.names == ()
    run(adapters.load_first())
    run(adapters.load_first())
    assert adapters.names == ("a", "b") and adapters.get("c") is None
    assert adapters.get("b") == LoRARequest("b", 2, "folder=b")
    assert len(adapters._llm.loaded) == 2


@pytest.mark.parametrize(
    "modules", [["a"], ["=x"], ["a="], ["{"], ['{"name": "a"}'], ['{"name": 1, "path": "x"}']]
)
def test_modules_that_are_none(modules):
    with pytest.raises(ValueError, match="lora_modules: .* is not"):
        served(*modules)


@pytest.mark.parametrize("modules", [["a=x", "a=y"], ["model=x"]])
def test_names_must_differ(modules):
    with pytest.raises(ValueError, match="is the name of something else too"):
        served(*modules)


def test_loading_replacing_and_unloading():
    adapters = served()
    run(adapters.load("a", "first"))
    for name in ("a", "model"):
        with pytest.raises(ApiError, match="is served already"):
            run(adapters.load(name, "second"))
    with pytest.raises(ApiError, match="is served already"):
        run(adapters.load("model", "second", inplace=True))
    for path in ("broken", "broken" * 1000):  # no file can have so long a name
        with pytest.raises(ApiError, match="not a folder") as missing:
            asyncio.run(adapters.load("a", path, inplace=True))
        assert missing.value.status == 404
    assert adapters.get("a").lora_path == "first"
    run(adapters.load("a", "second", inplace=True))
    assert adapters.get("a").lora_path == "second" and len(adapters._llm.loaded) == 1
    run(adapters.unload("a"))
    assert adapters.names == () and not adapters._llm.loaded
    with pytest.raises(ApiError, match="there is no adapter 'a'"):
        run(adapters.unload("a"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(path / str(i), checkpoint(), seed=i, rank=4, strength=3.0) for i in range(2)
    ]


@pytest.mark.slow
def test_adapters_over_http(folders):
    with few_programs():
        llm = AsyncLLM(
            str(checkpoint()),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes="32M",
            enable_lora=True,
            max_loras=1,
            enforce_eager=True,
        )
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = {
        name: llm.submit("Once upon", params, lora_request=adapter).result().outputs[0].text
        for name, adapter in {
            "demo": None,
            "first": LoRARequest("x", 90, str(folders[0])),
            "second": LoRARequest("y", 91, str(folders[1])),
        }.items()
    }
    assert len(set(expected.values())) == 3
    options = {"served_model_name": ("demo",), "lora_modules": (f"first={folders[0]}",)}
    with serving(llm, admin_api_key="secret", **options) as url:
        check(url, folders, expected)
    llm.shutdown()


def check(url, folders, expected):
    body = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    admin = {"Authorization": "Bearer secret"}

    def text(model):
        status, _, answer = ask(url, "/v1/completions", body | {"model": model})
        assert status == 200, answer
        answer = json.loads(answer)
        assert answer["model"] == model
        return answer["choices"][0]["text"]

    assert text("first") == expected["first"] and text("demo") == expected["demo"]
    assert ask(url, "/v1/completions", body | {"model": "second"})[0] == 404
    load = {"lora_name": "second", "lora_path": str(folders[1])}
    assert ask(url, "/v1/load_lora_adapter", load)[0] == 401
    assert ask(url, "/v1/load_lora_adapter", load, headers=admin)[0] == 200
    status, _, answer = ask(url, "/v1/load_lora_adapter", load, headers=admin)
    assert status == 400 and "is served already" in error_of(answer)["message"]
    broken = {"lora_name": "third", "lora_path": "/nowhere"}
    status, _, answer = ask(url, "/v1/load_lora_adapter", broken, headers=admin)
    assert status == 404 and "is not a folder" in error_of(answer)["message"]
    broken["lora_path"] = str(folders[0].parent)
    assert ask(url, "/v1/load_lora_adapter", broken, headers=admin)[0] == 400
    models = json.loads(ask(url, "/v1/models")[2])["data"]
    parents = {m["id"]: (m["parent"], m["root"]) for m in models}
    assert parents["second"] == ("demo", str(folders[1])) and parents["demo"][0] is None
    assert list(parents) == ["demo", "first", "second"]
    assert json.loads(ask(url, "/v1/models/first")[2])["parent"] == "demo"
    assert text("second") == expected["second"] and text("first") == expected["first"]
    chat = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert json.loads(ask(url, "/v1/chat/completions", chat)[2])["model"] == "second"
    replace = {"lora_name": "first", "lora_path": str(folders[1]), "load_inplace": True}
    assert ask(url, "/v1/load_lora_adapter", replace, headers=admin)[0] == 200
    assert text("first") == expected["second"]
    unload = {"lora_name": "first"}
    assert ask(url, "/v1/unload_lora_adapter", unload, headers=admin)[0] == 200
    assert ask(url, "/v1/unload_lora_adapter", unload, headers=admin)[0] == 404
    assert ask(url, "/v1/completions", body | {"model": "first"})[0] == 404
    assert text("second") == expected["second"]
