"""From flags and YAML to engines, servers and what Ray reserves. No Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from jaxpage import cli, ray_serve
from jaxpage.config import EngineConfig
from jaxpage.ray_serve.options import actor_options, for_replicas, read_args
from jaxpage.server.options import ServerOptions


def test_arguments_are_the_flags():
    config, options = read_args(
        {
            "model": "m",
            "max-num-seqs": 8,
            "tensor_parallel_size": 4,
            "served_model_name": "one",
            "allowed_origins": ["a", "b"],
            "profiler_dir": "p",
        }
    )
    assert (config.model, config.max_num_seqs, config.tensor_parallel_size) == ("m", 8, 4)
    assert options == ServerOptions(
        served_model_name=("one",),
        allowed_origins=("a", "b"),
        profiler_dir=Path("p"),
        max_stored_responses=0,
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "model"),
        ({"model": "m", "port": 1}, "port: Ray Serve's http_options"),
        ({"model": "m", "max_stored_responses": 5}, "max_stored_responses=5"),
        ({"model": "m", "block_size": -1}, "block_size"),
        ({"model": "m", "no_such_flag": 1}, "no_such_flag"),
    ],
)
def test_impossible_arguments_are_told(args, named):
    with pytest.raises((ValueError, TypeError), match=named):
        read_args(args)


def test_what_a_replica_or_a_proxy_would_refuse_is_told_before_the_start(tmp_path, capsys):
    args = ["serve", "m", "--backend", "ray", "--lora-modules", f"a={tmp_path}"]
    assert cli.main(args) == 2
    assert "lora_modules names 1 adapter(s)" in capsys.readouterr().err
    (tmp_path / "cert").write_text("x")
    with pytest.raises(ValueError, match="ssl_certfile=.*cert' has no certificate in PEM format"):
        for_replicas(ServerOptions(ssl_certfile=tmp_path / "cert"))


def test_tls_files_of_other_machines_are_not_read(tmp_path):
    (tmp_path / "cert").write_text("x")
    there = ServerOptions(ssl_certfile=tmp_path / "cert", ssl_keyfile=tmp_path / "none")
    assert for_replicas(there).ssl_keyfile == tmp_path / "none"


def test_keys_are_read_where_the_file_is(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    options = for_replicas(ServerOptions(api_key=("zero",), api_key_file=file))
    assert options.api_key == ("zero", "one", "two") and options.api_key_file is None


@pytest.mark.parametrize(
    ("cluster", "sizes", "expected"),
    [
        ({"CPU": 8.0}, {"tensor_parallel_size": 2}, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, {}, {"num_cpus": 1, "num_gpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, {"tensor_parallel_size": 4}, {"num_cpus": 1, "num_gpus": 4}),
        (
            {"CPU": 8.0, "TPU": 8.0},
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            {"num_cpus": 1, "resources": {"TPU": 4}},
        ),
    ],
)
def test_a_replica_has_the_devices_that_it_computes_on(cluster, sizes, expected):
    assert actor_options(cluster, EngineConfig(model="m", **sizes)) == expected


def test_an_engine_of_several_hosts_is_no_replica():
    with pytest.raises(ValueError, match="nnodes=2: with Ray each replica has one host"):
        actor_options({"CPU": 8.0}, EngineConfig(model="m", nnodes=2))


def packaged_yaml() -> dict:
    return yaml.safe_load(files("jaxpage.ray_serve").joinpath("serve.yaml").read_text())


def test_the_packaged_yaml_can_be_read():
    (application,) = packaged_yaml()["applications"]
    config, options = read_args(application["args"])
    assert config.model.startswith("Qwen/") and options.enable_prompt_tokens_details
    module, name = application["import_path"].split(":")
    assert getattr(sys.modules[module], name) is ray_serve.build_app
    assert packaged_yaml()["http_options"]["host"] == "127.0.0.1"


def test_replicas_are_given_to_ray(monkeypatch):
    seen = []
    monkeypatch.setattr(ray_serve, "run", lambda *args: seen.append(args))
    args = "serve m --replicas 3 --backend ray --port 9000 --max-num-seqs 4".split()
    assert cli.main(args) == 0
    ((config, options, num_replicas),) = seen
    assert config == EngineConfig(model="m", max_num_seqs=4)
    assert (options.port, num_replicas) == (9000, 3)


@pytest.mark.parametrize("args", [["--replicas", "2"], ["--replicas", "0", "--backend", "ray"]])
def test_replicas_without_a_backend_are_refused(args, capsys):
    assert cli.main(["serve", "m", *args]) == 2
    assert "--data-parallel-size" in capsys.readouterr().err


def test_without_ray_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    assert cli.main(["serve", "m", "--backend", "ray"]) == 2
    assert "pip install 'jaxpage[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_ray_is_not_imported_unless_it_is_asked_for():
    code = (
        "import sys, jaxpage.cli, jaxpage.server.run, jaxpage.ray_serve, jaxpage.ray_serve.front;"
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
