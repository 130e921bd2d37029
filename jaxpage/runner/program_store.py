"""Compiled programs on disk: a start that finds its own there neither traces nor compiles.

Knows files, and as text whatever a program depends on: its facts. Must not know what a program computes. All programs
with the same facts lie in a folder that is named by their hash and says in plain text what they are, so a start that
finds nothing can tell which fact differs.

A program is code, and jax keeps it in a pickle: whoever can write it can run anything as its reader. So the folders are
their owner's alone, and one that everybody may write to, or that is somebody else's, is not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

logger = logging.getLogger(__name__)

FORMAT = b"jaxpage program 1"
CHECKSUM_LEN = 32  # bytes
NUM_BLOCKS = "KV blocks"  # that sizing decided on, a name in `MeasuredSizes`
Facts = Mapping[str, str]


class ProgramStore:
    """The programs with those facts under `root`, for `devices`.

    Reading and writing never raise: a program that cannot be read is compiled, one that cannot be written (disk full)
    is not kept, and the log says so.
    """

    def __init__(self, root: Path, facts: Facts, devices: Sequence[jax.Device] = ()):
        """Without devices programs can only be saved."""
        self.folder = folder_of(root, facts)
        self._root, self._facts, self._devices = root, facts, list(devices)
        self._readable = bool(devices) and self.folder.is_dir() and _is_private(self.folder)
        self._complained = False

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program if it is there, whole, and of a kind that these devices run."""
        if not self._readable:
            return None
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if not _is_whole(path.stem, data):
            logger.warning(
                "%s is damaged (%d bytes): compiling %s anew", path.name, len(data), name
            )
            path.unlink(missing_ok=True)
            return None
        try:
            executable, in_tree, out_tree = pickle.loads(data[:-CHECKSUM_LEN])
            return deserialize_and_load(
                executable, in_tree, out_tree, execution_devices=self._devices
            )
        except Exception as error:  # whatever the runtime makes of a program that is not its own
            logger.warning("%s cannot be loaded here (%s): compiling it anew", name, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program. It appears whole or not at all."""
        try:
            payload = pickle.dumps(serialize(compiled))
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.folder / "facts.json"
            if not facts.exists():
                _write(facts, json.dumps(dict(self._facts), indent=1).encode())
            path = self._path(name)
            _write(path, payload + _checksum(path.stem, payload))
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            if not self._complained:
                logger.warning(
                    "%s is not kept in %s: %s; further ones are not reported",
                    name,
                    self.folder,
                    error,
                )
            self._complained = True

    def why_empty(self) -> str | None:
        """Which facts of programs kept for others differ; None if some have these facts, or there are none at all."""
        if self.folder.is_dir():
            return None if _is_private(self.folder) else f"{self.folder} can be written by others"
        nearest = min(_all_facts(self._root), key=self._differences, default=None)
        if nearest is None:
            return None
        names = self._differences(nearest)[1]
        return ", ".join(
            f"{name}: {_shortened(nearest.get(name), self._facts.get(name))}" for name in names
        )

    def _differences(self, other: Facts) -> tuple[int, list[str]]:
        names = [n for n in {**self._facts, **other} if other.get(n) != self._facts.get(n)]
        return len(names), names

    def _path(self, name: str) -> Path:
        return self.folder / (name.replace(" ", "-").replace("=", "") + ".program")


class MeasuredSizes:
    """Numbers that sizing measured for programs with those facts, by name. Without a `root` they are not kept."""

    def __init__(self, root: Path | None, facts: Facts):
        self._path = None if root is None else folder_of(root, facts).with_suffix(".sizes")
        found = {}
        if self._path is not None:
            try:
                found = json.loads(self._path.read_bytes())
            except (OSError, ValueError):
                pass
        is_whole = isinstance(found, dict) and all(type(n) is int for n in found.values())
        self._numbers: dict[str, int] = found if is_whole else {}

    def remember(self, name: str, measure: Callable[[], int]) -> int:
        """The number of that name, measured if nobody has yet."""
        if name not in self._numbers:
            self._put(name, measure())
        return self._numbers[name]

    def settle(self, name: str, number: int) -> int:
        """The number of the last time if it is at most `number`, and no more than a tenth smaller; else `number`."""
        last = self._numbers.get(name, 0)
        if 0.9 * number <= last <= number:
            return last
        self._put(name, number)
        return number

    def _put(self, name: str, number: int) -> None:
        self._numbers[name] = number
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._path, json.dumps(self._numbers).encode())
        except OSError as error:
            logger.warning("%s is not written: %s", self._path, error)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a folder of programs holds."""

    num_sets: int  # each with facts of its own
    num_programs: int
    num_bytes: int
    damaged: tuple[str, ...]  # files
    unsafe: tuple[str, ...]  # folders that are not read


def survey(root: Path) -> Survey:
    """Reads every program under `root`, and runs none."""
    folders = [path.parent for path in root.glob("*/facts.json")]
    programs = [path for folder in folders for path in folder.glob("*.program")]
    return Survey(
        num_sets=len(folders),
        num_programs=len(programs),
        num_bytes=sum(path.stat().st_size for path in programs),
        damaged=tuple(
            str(path) for path in programs if not _is_whole(path.stem, path.read_bytes())
        ),
        unsafe=tuple(str(folder) for folder in folders if not _is_private(folder)),
    )


def folder_of(root: Path, facts: Facts) -> Path:
    """Where the programs with those facts lie under `root`."""
    text = json.dumps(dict(facts), sort_keys=True).encode()
    return root / hashlib.sha256(FORMAT + text).hexdigest()[:24]


def _all_facts(root: Path) -> list[dict[str, Any]]:
    found = []
    for path in root.glob("*/facts.json"):
        try:
            facts = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict):
            found.append(facts)
    return found


def _shortened(old: str | None, new: str | None) -> str:
    """Two texts from where they begin to differ."""
    if old is None or new is None or max(len(old), len(new)) <= 60:
        return f"{old} is there, this is {new}"
    same = len(os.path.commonprefix([old, new]))
    start = max(0, same - 24)
    return f"...{old[start : same + 24]}... is there, this is ...{new[start : same + 24]}..."


def _is_private(folder: Path) -> bool:
    """Whether it is this user's, or root's, and not everybody's to write."""
    if not hasattr(os, "geteuid"):  # Windows keeps a user's folders to that user
        return True
    status = folder.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def _write(path: Path, data: bytes) -> None:
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise


def _is_whole(stem: str, data: bytes) -> bool:
    return data[-CHECKSUM_LEN:] == _checksum(stem, data[:-CHECKSUM_LEN])


def _checksum(stem: str, payload: bytes) -> bytes:
    return hashlib.sha256(FORMAT + stem.encode() + payload).digest()
