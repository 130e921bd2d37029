"""The server's options are checked before a model is loaded: ranges, files, and what they need of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import ssl
import subprocess
import threading
import urllib.request

import pytest

from jaxpage import cli
from jaxpage.config import EngineConfig
from jaxpage.server.context import model_names
from jaxpage.server.lora_modules import check_engine
from jaxpage.server.options import ServerOptions
from jaxpage.server.run import bind, make_http


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A folder with two keys, and certificates of each."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"],
            check=True, capture_output=True,
        )  # fmt: skip
    for name in ("both", "broken"):
        (folder / name).write_bytes((folder / "a.crt").read_bytes())
    with (folder / "both").open("ab") as file:
        file.write((folder / "a.key").read_bytes())
    (folder / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (folder / "text").write_text("root:x:0:0\n")
    return folder


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("port", 99999, r"in 0\.\.65535"),
        ("port", -1, r"in 0\.\.65535"),
        ("max_n", 0, "at least 1"),
        ("max_body_size", 0, "at least 1"),
        ("max_stop_strings", -1, "at least 0"),
        ("max_stored_responses", -1, "at least 0"),
        ("shutdown_timeout", -1.0, "at least 0"),
        ("shutdown_timeout", float("nan"), "at least 0"),
        ("write_timeout", -1.0, "above 0"),
        ("write_timeout", 0.0, "above 0"),
        ("write_timeout", float("nan"), "above 0"),
    ],
)
def test_numbers_out_of_range(option, value, allowed):
    with pytest.raises(ValueError, match=f"{option} must be {allowed}, got {value}"):
        ServerOptions(**{option: value})


def test_numbers_at_the_ends_of_their_ranges():
    ServerOptions(port=0, shutdown_timeout=0.0, max_n=1, max_stored_responses=0)
    ServerOptions(port=65535, shutdown_timeout=float("inf"))


def test_a_model_has_the_names_that_are_given_else_its_folder_and_its_path(tmp_path):
    (tmp_path / "demo").mkdir()
    assert model_names(ServerOptions(), str(tmp_path / "demo")) == ("demo", f"{tmp_path}/demo")
    assert model_names(ServerOptions(), "an/id") == ("an/id",)
    assert model_names(ServerOptions(served_model_name=("a", "b")), "an/id") == ("a", "b")


@pytest.mark.parametrize("flag", [["--port", "99999"], ["--port", "-1"], ["--max-n", "0"]])
def test_the_command_refuses_them(flag, capsys):
    with contextlib.suppress(SystemExit):
        assert cli.main(["serve", *flag]) == 2
    told = capsys.readouterr().err
    assert f"{flag[0][2:].replace('-', '_')} must be" in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("cert", "key", "told"),
    [
        ("none", None, "ssl_certfile=.*none' cannot be read: No such file"),
        ("a.crt", "none", "ssl_keyfile=.*none' cannot be read: No such file"),
        ("", None, "ssl_certfile=.* cannot be read: Is a directory"),
        ("text", "text", "ssl_certfile=.*text' has no certificate in PEM"),
        ("a.crt", "text", "ssl_keyfile=.*text' has no private key in PEM"),
        ("a.crt", None, "ssl_certfile=.*a.crt' has no private key; name it as ssl_keyfile"),
        ("broken", "a.key", "ssl_certfile=.*broken' cannot be used with the key in .*a.key'"),
        ("a.crt", "b.key", "ssl_certfile=.*a.crt' .* the key in .*b.key': KEY_VALUES_MISMATCH"),
    ],
)
def test_bad_tls_files(tls, cert, key, told):
    options = ServerOptions(port=0, ssl_certfile=tls / cert, ssl_keyfile=key and tls / key)
    with pytest.raises(ValueError, match=told):
        bind(options)


def test_a_key_needs_a_certificate(tls):
    with pytest.raises(ValueError, match="ssl_keyfile=.*a.key' needs ssl_certfile"):
        ServerOptions(ssl_keyfile=tls / "a.key")


@pytest.mark.parametrize(("cert", "key"), [("a.crt", "a.key"), ("both", None)])
def test_good_tls_files_are_read_once(tls, cert, key):
    options = ServerOptions(port=0, ssl_certfile=tls / cert, ssl_keyfile=key and tls / key)
    bind(options).close()
    assert options.ssl_context is options.ssl_context is not None
    assert ServerOptions().ssl_context is None


@pytest.mark.slow  # a server
def test_https(tls, llm):
    from tests.server.conftest import Lasting

    options = ServerOptions(port=0, ssl_certfile=tls / "a.crt", ssl_keyfile=tls / "a.key")
    bound = bind(options)
    bound.listen()  # who comes before the server is up waits
    http = make_http(Lasting(llm), options)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve([bound])), daemon=True)
    thread.start()
    trusted = ssl.create_default_context(cafile=tls / "a.crt")
    url = f"https://127.0.0.1:{bound.getsockname()[1]}/v1/models"
    with urllib.request.urlopen(url, context=trusted, timeout=60) as answer:
        assert json.load(answer)["data"]
    http.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_a_file_of_keys_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="api_key_file=.*none' cannot be read: No such file"):
        ServerOptions(api_key_file=tmp_path / "none").keys()
    (tmp_path / "binary").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="api_key_file=.*binary' cannot be read: .*utf-8"):
        ServerOptions(api_key_file=tmp_path / "binary").keys()


def test_a_key_that_only_vllm_reads_is_not_ignored(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ValueError, match="VLLM_API_KEY is set but not read here.*--api-key"):
        ServerOptions().check_files()
    ServerOptions(api_key=("mine",)).check_files()
    monkeypatch.setenv("VLLM_API_KEY", "")  # to vLLM that is none
    ServerOptions().check_files()


@pytest.mark.parametrize("prefix", ["api", "/api/", "/"])
def test_a_prefix_that_no_path_would_have(prefix):
    with pytest.raises(ValueError, match=f"root_path='{prefix}' is no prefix.*such as /api"):
        ServerOptions(root_path=prefix)
    ServerOptions(root_path="/a/b")


def test_the_folder_for_traces(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ValueError, match="profiler_dir=.* cannot be written to: "):
            bind(ServerOptions(port=0, profiler_dir=folder))
    bind(ServerOptions(port=0, profiler_dir=tmp_path / "new" / "folder")).close()
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_adapters_from_the_start_are_checked(tmp_path):
    with pytest.raises(ValueError, match="lora_modules: 'foo' is not NAME=PATH"):
        ServerOptions(lora_modules=("foo",))
    for named in ({"lora_modules": ("a=x", "a=y")}, {"served_model_name": ("a",)}):
        with pytest.raises(ValueError, match="'a' is the name of something else too"):
            ServerOptions(**{"lora_modules": ("a=x",)} | named)
    with pytest.raises(ValueError, match="lora_modules: a=.*/none: .* is not a folder"):
        bind(ServerOptions(port=0, lora_modules=(f"a={tmp_path}/none",)))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match='peft_type is None; only "LORA" can be applied'):
        bind(ServerOptions(port=0, lora_modules=(f"a={tmp_path}",)))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    bind(ServerOptions(port=0, lora_modules=(f"a={tmp_path}",))).close()


def test_adapters_need_an_engine_that_takes_them():
    with pytest.raises(ValueError, match="lora_modules names 1 adapter.*add --enable-lora"):
        check_engine(("a=x",), EngineConfig(model="m"))
    check_engine(("a=x",), EngineConfig(model="m", enable_lora=True))
    check_engine((), EngineConfig(model="m"))


def test_options_travel_to_other_processes():
    options = ServerOptions(lora_modules=("a=/only/there",), max_n=2)
    assert pickle.loads(pickle.dumps(options)) == options
