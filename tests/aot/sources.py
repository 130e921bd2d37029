"""What the text of a program depends on: the code of this repository that lowering it imports, and versions.

As long as they are the same, a program need not be lowered to know that it has not changed.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.aot.program import code_of

ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "ml_dtypes")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """modules: files, relative to the root; hash: of their code and all else."""

    modules: tuple[str, ...]
    hash: str

    def are_unchanged(self) -> bool:
        return _hash(self.modules) == self.hash


def of_this_process() -> Sources:
    """Of the modules imported so far."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = (Path(file) for file in files if file)
    # An environment may be in the root, too.
    folders = [ROOT / name for name in ("jaxpage", "pallas_kernels", "tests")]
    ours = {p for p in paths if any(p.is_relative_to(folder) for folder in folders)}
    modules = sorted(str(path.relative_to(ROOT)) for path in ours)
    return Sources(modules=tuple(modules), hash=_hash(modules))


def _hash(modules: tuple[str, ...] | list[str]) -> str:
    """ "" if a module is gone."""
    tuned = sorted(ROOT.glob("pallas_kernels/*/tuned/*.json"))
    paths = [ROOT / module for module in modules]
    if not all(path.exists() for path in paths):
        return ""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    parts = [platform.python_version(), *versions, *map(str, modules)]
    parts += [*map(_code, paths), *(f"{path.name} {path.read_text()}" for path in tuned)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _code(path: Path) -> str:
    return code_of(ast.parse(path.read_text()))
