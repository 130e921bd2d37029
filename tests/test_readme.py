"""The README tells the truth: its file tree is the tree, its options are the options."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def files_of_tree(text: str) -> list[str]:
    """Paths of a tree that is drawn with two spaces a level; folders end in a slash."""
    folders: list[str] = []
    paths = []
    for line in text.splitlines():
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        del folders[level:]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.append("".join(folders) + name)
            assert len(line.split()) > 1, f"{name}: a name without a word about it"
    return paths


def test_the_file_tree_names_every_file_once():
    (tree,) = re.findall(r"```text\n(.*?)```", section("The program, file by file"), re.S)
    listed = files_of_tree(tree)
    exist = [
        str(path.relative_to(ROOT))
        for package in ("jaxpage", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" or path.parent == ROOT / "jaxpage"
    ]
    assert sorted(listed) == sorted(exist)


def test_the_nine_files_exist():
    files = re.findall(r"^\| \d \| `(.*?)`", section("The life of a request: nine files"), re.M)
    assert len(files) == 9
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_options_table_is_the_config():
    from jaxpage import EngineConfig

    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Options"), re.M)
    fields = {f.name: f for f in dataclasses.fields(EngineConfig)}
    assert [name for name, _ in rows] == list(fields)
    for name, default in rows:
        if default == "required":
            assert fields[name].default is dataclasses.MISSING
        else:
            assert default == f"`{fields[name].default}`", name


def test_the_layout_of_the_top_level_is_fixed():
    entries = {p.name for p in ROOT.iterdir() if not p.name.startswith((".", "__"))}
    entries -= {p.name for p in ROOT.glob("*.egg-info")} | {"build"}
    assert entries <= {
        *("jaxpage", "pallas_kernels", "tests", "notebooks"),
        *("pyproject.toml", "README.md", "LICENSE"),
    }


def test_set_up_is_two_commands_that_the_continuous_integration_can_find():
    commands = re.findall(r"```bash\n(.*?)```", section("Set up"), re.S)
    assert len(commands) == 2 and all(c.count("\n") == 1 for c in commands)
    assert "jaxpage demo" in commands[0] and "pytest" in commands[1]
    assert all(command.startswith("python3 -m venv ") for command in commands)
