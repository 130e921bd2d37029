"""Cached executables on disk: an engine that finds its programs there neither traces nor compiles.

Everything a program depends on is given as text: its facts. Executables with the same facts share a folder. Its name is
the hash of the facts, and it contains them as plain text, so that a cache miss can report which fact differs.

jax serialises an executable as a pickle, so whoever can write to the file can run code as its reader. Therefore the
folders are private, and a folder that belongs to others, or that others can write to, is not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxpage.runner.verified_files import VerifiedFiles, write_atomically

logger = logging.getLogger(__name__)

FORMAT = b"jaxpage program 1"
NUM_BLOCKS = "KV blocks"  # the size of the pool, as a name in `MeasuredSizes`
Facts = Mapping[str, str]


class ProgramStore:
    """The executables with given facts under `root`, for `devices`.

    Reading and writing never raise: what cannot be read is compiled, what cannot be written (disk full) is not cached.
    """

    def __init__(self, root: Path, facts: Facts, devices: Sequence[jax.Device] = ()):
        """Without devices, executables can only be saved."""
        self.folder = folder_of(root, facts)
        self._root, self._facts, self._devices = root, facts, list(devices)
        self._files = VerifiedFiles(FORMAT)
        self._readable = bool(devices) and _is_there(self.folder) and _is_private(self.folder)

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The executable, if it is stored, undamaged, and can run on these devices."""
        payload = self._files.read(self._path(name)) if self._readable else None
        if payload is None:
            return None
        try:
            executable, in_tree, out_tree = pickle.loads(payload)
            return deserialize_and_load(
                executable, in_tree, out_tree, execution_devices=self._devices
            )
        except Exception as error:  # the runtime may raise anything for a foreign executable
            logger.warning("%s cannot be loaded here (%s): compiling it", name, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Write an executable atomically."""
        try:
            payload = pickle.dumps(serialize(compiled))
            facts = self.folder / "facts.json"
            if not facts.exists():
                write_atomically(facts, json.dumps(dict(self._facts), indent=1).encode())
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            self._files.warn("save", f"{name} is not cached in {self.folder}: {error}")
        else:
            self._files.write(self._path(name), payload)

    def has(self, name: str) -> bool:
        """Whether there is a file of the executable."""
        return os.path.exists(self._path(name))

    def why_empty(self) -> str | None:
        """Which facts of the stored executables differ; None if some have these facts, or none are stored at all."""
        if _is_there(self.folder):
            return None if _is_private(self.folder) else f"{self.folder} can be written by others"
        nearest = min(_all_facts(self._root), key=lambda x: len(self._differences(x)), default=None)
        if nearest is None:
            return None
        return ", ".join(
            f"{name}: {_shortened(nearest.get(name), self._facts.get(name))}"
            for name in self._differences(nearest)
        )

    def _differences(self, other: Facts) -> list[str]:
        return [n for n in {**self._facts, **other} if other.get(n) != self._facts.get(n)]

    def _path(self, name: str) -> Path:
        return self.folder / (name.replace(" ", "-").replace("=", "") + ".program")


class MeasuredSizes:
    """Numbers measured for programs with given facts, by name. Without a `root` they are not written to disk."""

    def __init__(self, root: Path | None, facts: Facts):
        self._path = None if root is None else folder_of(root, facts).with_suffix(".sizes")
        found: Any = None if self._path is None else _read_json(self._path)
        is_whole = isinstance(found, dict) and all(type(n) is int for n in found.values())
        self._numbers: dict[str, int] = found if is_whole else {}

    def remember(self, name: str, measure: Callable[[], int]) -> int:
        """The number with that name, measured if it is not known yet."""
        if name not in self._numbers:
            self._put(name, measure())
        return self._numbers[name]

    def settle(self, name: str, number: int) -> int:
        """The number of the last run if it is at most `number` and at most a tenth smaller; otherwise `number`."""
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
            write_atomically(self._path, json.dumps(self._numbers).encode())
        except OSError as error:
            logger.warning("%s is not written: %s", self._path, error)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The contents of a folder of cached executables."""

    num_sets: int  # with different facts
    num_programs: int
    num_bytes: int
    damaged: tuple[str, ...]  # files
    unsafe: tuple[str, ...]  # folders that are not read


def survey(root: Path) -> Survey:
    """Check every executable under `root` without running it."""
    files = VerifiedFiles(FORMAT)
    folders = [path.parent for path in _facts_under(root)]
    programs = [path for folder in folders for path in folder.glob("*.program")]
    return Survey(
        num_sets=len(folders),
        num_programs=len(programs),
        num_bytes=sum(path.stat().st_size for path in programs),
        damaged=tuple(str(path) for path in programs if not files.is_whole(path)),
        unsafe=tuple(str(folder) for folder in folders if not _is_private(folder)),
    )


def folder_of(root: Path, facts: Facts) -> Path:
    """Where the executables with those facts lie under `root`."""
    text = json.dumps(dict(facts), sort_keys=True).encode()
    return root / hashlib.sha256(FORMAT + text).hexdigest()[:24]


def _facts_under(root: Path) -> list[Path]:
    return list(root.glob("*/facts.json")) if _is_there(root) else []


def _all_facts(root: Path) -> list[dict[str, Any]]:
    found = map(_read_json, _facts_under(root))
    return [facts for facts in found if isinstance(facts, dict)]


def _read_json(path: Path) -> Any:
    """None if the file is absent or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _shortened(old: str | None, new: str | None) -> str:
    """Two texts around the place where they begin to differ."""
    if old is None or new is None or max(len(old), len(new)) <= 60:
        return f"{old} is there, this is {new}"
    same = len(os.path.commonprefix([old, new]))
    start = max(0, same - 24)
    return f"...{old[start : same + 24]}... is there, this is ...{new[start : same + 24]}..."


def _is_there(folder: Path) -> bool:
    """Whether there is such a folder. `Path.is_dir` would raise PermissionError in a parent that cannot be searched."""
    return os.path.isdir(folder)


def _is_private(folder: Path) -> bool:
    """Whether this user or root owns it, and it is not world-writable."""
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are private
        return True
    status = folder.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH
