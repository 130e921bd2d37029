"""A model by its name: found in a Hugging Face cache that the test makes, and never half of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpage import LLM, tiny
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.hub import local_folder

NAME, COMMIT = "someone/tiny-model", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path) -> Path:
    """A cache as huggingface_hub lays it out, with one model."""
    repository = tmp_path / "hub" / "models--someone--tiny-model"
    tiny.build(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def snapshot(cache: Path) -> Path:
    return cache / "models--someone--tiny-model" / "snapshots" / COMMIT


def test_a_folder_is_itself(cache, tmp_path, monkeypatch):
    folder = str(snapshot(cache))
    assert local_folder("model", folder) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_folder("model", "~/hub") == str(cache)


def test_a_name_is_looked_up_in_the_cache(cache):
    for revision in (None, "main", COMMIT):
        found = local_folder("model", NAME, revision=revision, download_dir=str(cache))
        assert found == str(snapshot(cache))


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("someone/else", None, "model='someone/else' is no folder, .* it is not in the cache"),
        (NAME, "v2", "at revision 'v2' not in the cache"),
        ("/no/such/folder", None, "model='/no/such/folder' does not exist"),
        ("./folder", None, "does not exist"),
    ],
)
def test_what_is_nowhere_is_refused_without_a_network(cache, name, revision, message):
    with pytest.raises(ValueError, match=message):
        local_folder("model", name, revision=revision, download_dir=str(cache))


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_part_of_a_model_is_not_taken_for_it(cache, lost):
    (snapshot(cache) / lost).unlink()
    with pytest.raises(ValueError, match="only partly in the cache .* cannot be downloaded"):
        local_folder("model", NAME, download_dir=str(cache))


def test_shards_count_by_their_index(cache):
    folder = snapshot(cache)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert local_folder("model", NAME, download_dir=str(cache)) == str(folder)
    index["weight_map"]["b"] = "model-2.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="only partly"):
        local_folder("model", NAME, download_dir=str(cache))


def test_random_weights_and_tokenizers_need_no_weights(cache):
    (snapshot(cache) / "model.safetensors").unlink()
    options = {"model": NAME, "tokenizer": NAME, "download_dir": str(cache)}
    config = EngineConfig.from_options(load_format="dummy", **options).with_local_files()
    assert config.model == config.tokenizer == str(snapshot(cache))
    with pytest.raises(ValueError, match="only partly"):
        EngineConfig.from_options(**options).with_local_files()
    spec = make_engine_spec(EngineConfig.from_options(**options), device=jax.local_devices()[0])
    assert spec.config.model == str(snapshot(cache))  # as `plan` and `compile` do


def test_what_is_missing_is_downloaded(cache, monkeypatch):
    """The network is a stub that completes the snapshot."""
    import huggingface_hub

    ask, asked = huggingface_hub.snapshot_download, []

    def snapshot_download(name, *, local_files_only=False, **options):
        if local_files_only:
            return ask(name, local_files_only=True, **options)
        asked.append((name, options))
        whole.rename(snapshot(cache) / "model.safetensors")
        return str(snapshot(cache))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    whole = (snapshot(cache) / "model.safetensors").rename(cache / "whole")
    options = {"revision": "main", "download_dir": str(cache), "token": "t"}
    assert local_folder("model", NAME, **options) == str(snapshot(cache))
    ((name, given),) = asked
    assert name == NAME
    assert (given["revision"], given["cache_dir"], given["token"]) == ("main", str(cache), "t")
    assert "*.safetensors" in given["allow_patterns"] and "*.bin" not in given["allow_patterns"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_in_place_of_a_folder_is_told(cache, file):
    model = str(snapshot(cache) / file)
    with pytest.raises(ValueError, match=rf"model='.*{file}' is a file; give the folder"):
        LLM(model)


def test_an_llm_starts_from_a_name(cache):
    options = {"max_model_len": 64, "max_num_seqs": 1, "num_gpu_blocks_override": 8}
    llm = LLM(NAME, download_dir=str(cache), enforce_eager=True, **options)
    assert llm.config.model == llm.config.tokenizer == str(snapshot(cache))
    assert llm.get_tokenizer()("the dog")["input_ids"]


def test_the_cache_is_that_of_the_environment(cache):
    """HF_HOME is read when huggingface_hub is imported, so in a process of its own."""
    code = f"from jaxpage.hub import local_folder; print(local_folder('model', {NAME!r}))"
    for variable, folder in (("HF_HOME", cache.parent), ("HF_HUB_CACHE", cache)):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_H")}
        environment |= {"HF_HUB_OFFLINE": "1", variable: str(folder)}
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert out.stdout.strip() == str(snapshot(cache)), out.stderr
