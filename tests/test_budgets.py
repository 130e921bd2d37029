"""Size rules that keep the code small. A budget is raised in RAISED, with the reason beside it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("jaxpage/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])

FORBIDDEN_WORDS = ("Manager", "Helper", "Util", "Utils", "Handler", "Mixin", "Base")
FORBIDDEN_FOLDERS = re.compile(r"v\d+|experimental|legacy|old|utils|helpers|common")

# (what, where): (budget, why). An entry that is no longer needed fails the test too.
PAGED_ATTENTION = "pallas_kernels/paged_attention/xla.py"
_CONTRACT = "five arrays say what is read and where it lies, the rest is what models vary"
_SCARCE = "what is scarce: tokens, request slots, blocks, adapter slots; and who is served first"
_VLLM = "vLLM's parameters in their order: a user changes the import"
RAISED: dict[tuple[str, str], tuple[int, str]] = {
    ("parameters", f"{PAGED_ATTENTION}:paged_attention"): (10, _CONTRACT),
    ("parameters", "pallas_kernels/paged_attention/reference.py:paged_attention"): (9, _CONTRACT),
    ("parameters", "pallas_kernels/paged_attention/gpu.py:paged_attention"): (12, _CONTRACT),
    ("parameters", "pallas_kernels/paged_attention/tpu.py:paged_attention"): (15, _CONTRACT),
    ("fields", "jaxpage/config.py:EngineConfig"): (67, "vLLM's options under their names"),
    ("lines", "jaxpage/config.py"): (526, "one subject: those options, and what follows from them"),
    ("parameters", "jaxpage/engine/scheduler.py:Scheduler.__init__"): (11, _SCARCE),
    ("attributes on self", "jaxpage/engine/scheduler.py:Scheduler"): (18, _SCARCE),
    ("parameters", "jaxpage/llm.py:LLM.chat"): (14, _VLLM),
    ("parameters", "jaxpage/llm.py:LLM.add_request"): (9, _VLLM),
    ("parameters", "jaxpage/prompts.py:parse_chat"): (9, _VLLM),
}


def is_kernel(path: Path) -> bool:
    """Files that hold Pallas kernels; references and XLA versions are ordinary code."""
    platform, _, part = path.stem.partition("_")
    is_ours = path.is_relative_to(ROOT / "pallas_kernels") and platform in ("gpu", "tpu")
    return is_ours and part != "layout"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Outermost functions and methods. A closure counts as a part of what surrounds it."""

    def walk(node: ast.AST, prefix: str):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name_of(path)}:{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return list(walk(parsed(path), ""))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


@functools.cache
def classes(path: Path) -> list[ast.ClassDef]:
    return [n for n in nodes(path) if isinstance(n, ast.ClassDef)]


def fields(cls: ast.ClassDef) -> list[str]:
    return [n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and not _is_class_var(n)]


def _is_class_var(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def self_attributes(cls: ast.ClassDef) -> set[str]:
    """Names assigned as `self.x = ...` (in tuples too) by the methods."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def over_budget(what: str, sizes: list[tuple[str, int, int]]) -> list[str]:
    """Complaints about the (name, size, budget) that are too large, and on idle raises."""
    complaints = []
    for name, size, budget in sizes:
        raised = RAISED.get((what, name))
        if raised and size <= budget:
            complaints.append(f"{name}: {size} {what} need no raised budget; delete the entry")
        elif size > (raised[0] if raised else budget):
            complaints.append(f"{name}: {size} {what}, the budget is {budget}")
    return complaints


def test_files_are_short():
    sizes = [
        (name_of(path), len(path.read_text(encoding="utf-8").splitlines()), 400) for path in FILES
    ]
    assert over_budget("lines", sizes) == []


def test_functions_are_short():
    """Without the docstring: explaining a contract is free."""

    def body_len(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        assert node.end_lineno is not None
        first = node.body[0]
        doc = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0
        return node.end_lineno - node.lineno + 1 - doc

    sizes = [
        (name, body_len(node), 200 if is_kernel(path) else 60)
        for path in FILES
        for name, node in functions(path)
    ]
    assert over_budget("lines", sizes) == []


def test_functions_take_few_parameters():
    sizes = []
    for path in FILES:
        for name, node in functions(path):
            a = node.args
            names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            sizes.append((name, len([n for n in names if n not in ("self", "cls")]), 8))
    assert over_budget("parameters", sizes) == []


def test_objects_have_few_attributes():
    sizes = [
        (f"{name_of(path)}:{cls.name}", len(self_attributes(cls)), 15)
        for path in FILES
        for cls in classes(path)
    ]
    assert over_budget("attributes on self", sizes) == []


@pytest.mark.parametrize(
    ("file", "cls", "budget"),
    [("jaxpage/config.py", "EngineConfig", 25), ("jaxpage/batch.py", "StepBatch", 12)],
)
def test_shared_types_have_few_fields(file, cls, budget):
    (found,) = (c for c in classes(ROOT / file) if c.name == cls)
    assert over_budget("fields", [(f"{file}:{cls}", len(fields(found)), budget)]) == []


def test_every_raised_budget_names_something_that_exists():
    known = {name_of(path) for path in FILES}
    known |= {name for path in FILES for name, _ in functions(path)}
    known |= {f"{name_of(path)}:{cls.name}" for path in FILES for cls in classes(path)}
    assert [key for key in RAISED if key[1] not in known] == []


def test_class_names_say_what_the_thing_is():
    words = [
        (f"{name_of(path)}:{cls.name}", word)
        for path in FILES
        for cls in classes(path)
        for word in re.findall(r"[A-Z][a-z]+", cls.name)
        if word in FORBIDDEN_WORDS
    ]
    assert words == []


def test_folders_and_files_are_named_for_a_subject():
    """No second generation beside the first, no drawer for the rest: git keeps the history."""
    parts = {part for path in FILES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert [part for part in sorted(parts) if FORBIDDEN_FOLDERS.fullmatch(part)] == []


def test_only_one_file_reads_the_environment():
    readers = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if path != ROOT / "jaxpage/environment.py"
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv", "environb"))
    ]
    assert readers == []


def test_every_file_says_what_it_is():
    silent = [
        name_of(p) for p in FILES if p.read_text(encoding="utf-8").strip() and not _docstring(p)
    ]
    assert silent == []


def _docstring(path: Path) -> str | None:
    return ast.get_docstring(parsed(path))
