"""Models by their name on the Hugging Face hub: found in the local cache, downloaded where they are not.

And the small files of models in a bucket. Knows huggingface_hub, etils and which files of a repository are read. Must
not know what is in them.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "gpt2", "Qwen/Qwen3-0.6B"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OTHERS = ("*.json", "*.txt", "*.model", "*.jinja")  # in subfolders too
_IN_BUCKETS = (*_OTHERS, "additional_chat_templates/*.jinja")
# Further copies of the weights, in other formats.
_IGNORED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "gguf/*")


def local_folder(
    option: str,
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: bool | str | None = None,
    needs_weights: bool = True,
) -> str:
    """The folder `name` (a file too, without weights), else that of the model of this name on the hub. A place in a
    bucket stays as it is.

    The cache is Hugging Face's (HF_HOME, HF_HUB_CACHE), or `download_dir`. What is there is used
    without asking the network, so a `revision` such as "main" is the one of the download. What is
    not is downloaded, unless HF_HUB_OFFLINE is set. Raises ValueError, with `option` as its name,
    for what is neither here nor there.
    """
    path = Path(name).expanduser()
    if is_url(name):
        return name
    if needs_weights and path.is_file():
        raise ValueError(f"{option}={name!r} is a file; give the folder that it is in")
    if path.exists():
        return str(path)
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{option}={name!r} does not exist")
    from huggingface_hub import constants, snapshot_download

    options: dict[str, Any] = {"revision": revision, "cache_dir": download_dir, "token": token}
    try:
        found = snapshot_download(name, local_files_only=True, **options)
        if _is_complete(Path(found), needs_weights):
            return found
    except Exception:  # of many types: not in the cache, or no such revision of it
        found = None
    reason = "some files are missing"
    try:
        patterns = [*_OTHERS, *(_WEIGHTS if needs_weights else ())]
        # Without a network it returns what is in the cache.
        found = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=list(_IGNORED), **options
        )
        if _is_complete(Path(found), needs_weights):
            return found
    except Exception as error:  # of many types: no network, no such model, no access
        reason = " ".join(str(error).split())
    where = "not in" if found is None else "only partly in"
    at = f" at revision {revision!r}" if revision else ""
    raise ValueError(
        f"{option}={name!r} is no folder, and as a model of the Hugging Face hub it is{at} {where} the cache "
        f"{download_dir or constants.HF_HUB_CACHE} and cannot be downloaded: {reason}"
    )


def is_url(name: str) -> bool:
    """Whether a model is in a bucket of Google Cloud, gs://..., which is read through etils and Orbax."""
    return name.startswith("gs://")


def bucket_path(name: str) -> Any:
    """A place in a bucket as etils' path. Raises ValueError without the package that reads buckets."""
    from etils import epath

    try:
        path = epath.Path(name)
        path.exists()
    except ImportError as error:
        raise ValueError(f"{name} is in a bucket, which needs another package: {error}") from error
    except Exception as error:  # of many types: no network, no such bucket, no access
        raise ValueError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    return path


def small_files(
    name: str, *, download_dir: str | None = None, token: bool | str | None = None
) -> str:
    """The folder of `hf_config_path`, see `local_folder`; of a place in a bucket a copy of all but the weights."""
    if not is_url(name):
        return local_folder(
            "hf_config_path", name, download_dir=download_dir, token=token, needs_weights=False
        )
    path = bucket_path(name)
    if not (path / "config.json").exists():
        raise ValueError(
            f"{name}/config.json does not exist; give hf_config_path, a folder or name on the hub that has the "
            "config.json and the tokenizer"
        )
    folder = Path(tempfile.mkdtemp(prefix="jaxpage-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for pattern in _IN_BUCKETS:
        for file in path.glob(pattern):
            copy = folder / file.relative_to(path)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return str(folder)


def _is_complete(folder: Path, needs_weights: bool) -> bool:
    """Whether a snapshot has all that is read of it; one of another program may have parts."""
    if not needs_weights:
        return any(folder.glob("tokenizer*")) or (folder / "config.json").is_file()
    if not (folder / "config.json").is_file():
        return False
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return all((folder / file).is_file() for file in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def display_name(folder: str) -> str:
    """The name of a model on the hub, of its snapshot in a cache; else the folder's last part."""
    path = Path(folder).absolute()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.name
