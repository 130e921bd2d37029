"""The READMEs tell the truth: their files exist, their options are the options, their commands and code run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpage import EngineConfig, cli, tiny
from jaxpage.async_llm import AsyncLLM
from jaxpage.demo import checkpoint
from jaxpage.server.options import ServerOptions
from tests import fake_vision
from tests.adapters import save_adapter
from tests.few_programs import few_programs
from tests.server.conftest import serving

ROOT = Path(__file__).parent.parent
FILE_MAPS = (
    *("jaxpage", "jaxpage/aot", "jaxpage/bench", "jaxpage/demo", "jaxpage/ray_serve"),
    *("jaxpage/research", "jaxpage/rl", "jaxpage/server", "pallas_kernels"),
)
TEXTS = {
    name: (ROOT / name / "README.md").read_text(encoding="utf-8")
    for name in (".", *FILE_MAPS, "tests")
}
MAX_WORDS, MAX_LINES = 1100, 220  # of the first README: five minutes

each_readme = pytest.mark.parametrize("name", TEXTS)


def section(title: str, name: str = ".") -> str:
    return TEXTS[name].split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(language: str, name: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[name], re.S)


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


@pytest.mark.parametrize("name", FILE_MAPS)
def test_the_file_map_names_every_file_once(name):
    """But those of folders that have a README of their own."""
    (tree,) = re.findall(r"```text\n(.*?)```", section("Files", name), re.S)
    others = [ROOT / other for other in FILE_MAPS if other.startswith(f"{name}/")]
    exist = [
        str(path.relative_to(ROOT / name))
        for path in (ROOT / name).rglob("*.py")
        if not any(path.is_relative_to(other) for other in others)
        and (path.name != "__init__.py" or path.parent.parent == ROOT)
    ]
    assert sorted(files_of_tree(tree)) == sorted(exist)


def test_five_minutes_are_enough():
    assert len(TEXTS["."].split()) <= MAX_WORDS
    assert len(TEXTS["."].splitlines()) <= MAX_LINES


def test_the_nine_files_exist():
    files = re.findall(r"^\| \d \| `(.*?)`", section("The life of a request: nine files"), re.M)
    assert len(files) == 9
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("name", "options"), [("jaxpage", EngineConfig), ("jaxpage/server", ServerOptions)]
)
def test_the_options_table_is_the_config(name, options):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Options", name), re.M)
    fields = {f.name: f for f in dataclasses.fields(options)}
    fields.pop("options_without_effect", None)  # not given, but found
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


def test_set_up_is_two_commands():
    commands = re.findall(r"```bash\n(.*?)```", section("Set up"), re.S)
    assert len(commands) == 2 and all(c.count("\n") == 1 for c in commands)
    assert "jaxpage demo" in commands[0] and "pytest" in commands[1]
    assert all(command.startswith("python3 -m venv ") for command in commands)


@pytest.mark.parametrize("part", ["jaxpage demo", r"\[test\].* pytest", r"\[aot\].* pytest"])
def test_the_continuous_integration_finds_its_commands(part):
    """As `.ci/run` looks for them."""
    text = TEXTS["."] + TEXTS["tests"]
    assert len(re.findall(rf"^python3[.0-9]* -m venv .*{part}", text, re.M)) == 1


@each_readme
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)]*)\)", TEXTS[name])
    assert [link for link in links if not (ROOT / name / link.partition("#")[0]).exists()] == []


class Parsed(Exception):
    """The flags of a command were understood."""


@each_readme
def test_commands_are_understood(name, monkeypatch):
    parse = cli.tyro.cli

    def parse_only(documented: Any, **options: Any) -> None:
        if not isinstance(documented, type):  # a function, which must not run

            @functools.wraps(documented)
            def documented(*args: Any, **flags: Any) -> None:
                pass

        raise Parsed(parse(documented, **options))

    monkeypatch.setattr(cli.tyro, "cli", parse_only)
    for line in "".join(blocks("bash", name)).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["jaxpage"] and words[1:] != ["--version"]:
            with pytest.raises(Parsed):
                cli.main(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), line


def code() -> list[Any]:
    """Every block of Python, by where it stands."""
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name in TEXTS
        for number, block in enumerate(blocks("python", name))
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[int], Path]:
    """The folder of a tiny model with so many layers."""

    @functools.cache
    def built(num_layers: int) -> Path:
        config = tiny.TINY_CONFIG | {"num_hidden_layers": num_layers}
        path = tmp_path_factory.mktemp("model") / "tiny"
        return tiny.write_checkpoint(path, config, write_more=tiny._write_tokenizer)

    return built


@contextlib.contextmanager
def running_server(block: str, folder: Path) -> Iterator[str]:
    """The code, with the address of a server if it asks for one."""
    address = "http://127.0.0.1:8000"
    if address not in block:
        yield block
        return
    llm = AsyncLLM(str(folder), enforce_eager=True, max_num_seqs=8)
    with serving(llm, api_key=("SECRET",)) as url:
        yield block.replace(address, url)
    llm.shutdown()


# Of `fake_vision`, which needs the demo's vocabulary.
SEEING = fake_vision.OPTIONS | {
    "chat_template": fake_vision.TEMPLATE,
    "hf_overrides": fake_vision.OPTIONS["hf_overrides"] | {"num_hidden_layers": 1},
}
# Instead of models that must be downloaded, and of the demo's: FOLDER has one with fewer layers.
SMALL = {
    '"model": "Qwen/Qwen2.5-0.5B-Instruct"': '"model": FOLDER',
    '"Qwen/Qwen2.5-7B-Instruct"': "FOLDER, enforce_eager=True, max_num_seqs=8",
    '"Qwen/Qwen3-8B"': "FOLDER, enforce_eager=True, max_num_seqs=8",
    '"Qwen/Qwen2.5-0.5B-Instruct"': "FOLDER, enforce_eager=True, max_num_seqs=8",
    '"Qwen/Qwen2.5-VL-3B-Instruct"': f"{str(checkpoint())!r}, enforce_eager=True, max_num_seqs=8, **{SEEING!r}",
    '"Qwen/Qwen3-Embedding-0.6B"': "FOLDER, runner='pooling', enforce_eager=True",
    "LLM(str(checkpoint())": "LLM(FOLDER, enforce_eager=True, max_num_seqs=8",
    "checkpoint()": "FOLDER",
    "hidden_size = 896": f"hidden_size = {tiny.TINY_CONFIG['hidden_size']}",
}


def save_head(folder: Path, model: Path) -> None:
    """An EAGLE-3 head for the tiny model."""
    from tests.eagle_heads import CONFIG, Head, Target

    sizes = {name: tiny.TINY_CONFIG[name] for name in ("hidden_size", "vocab_size")}
    config = CONFIG | sizes | {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    Head(config, Target(model).embedding).save(folder)


@pytest.mark.slow  # whole engines
@pytest.mark.parametrize("block", code())
def test_code_runs(block, model, tmp_path, monkeypatch):
    """With programs of few sizes. What is quoted instead, because it needs what surrounds it, stands so in the code."""
    if "import" not in block:
        quoted = "".join(block.split()).rstrip(",")
        sources = [*ROOT.glob("jaxpage/models/*.py"), *ROOT.glob("jaxpage/sampling/*.py")]
        assert any(quoted in "".join(path.read_text().split()) for path in sources)
        return
    monkeypatch.chdir(tmp_path)
    folder = model(1 + max(map(int, re.findall(r"blocks\.(\d)\.", block)), default=0))
    for name in re.findall(r'"(adapters/\w+)"', block):
        save_adapter(tmp_path / name, folder, seed=0)
    for name in re.findall(r'"(\S+\.eagle3)"', block):
        save_head(tmp_path / name, folder)
    for theirs, ours in SMALL.items():
        block = block.replace(theirs, ours)
    with few_programs(), running_server(block, folder) as block, fake_vision.registered():
        names = {"__name__": "__main__", "FOLDER": str(folder)}
        exec(compile(ast.parse(block), "README.md", "exec"), names)
    for recording in tmp_path.glob("*.calls"):
        assert cli.main(["replay", recording.name]) == 0
