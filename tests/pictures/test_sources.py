"""URLs of pictures: what is allowed is read, everything else is refused, within limits of bytes and time."""

from __future__ import annotations

import base64
import http.server
import os
import threading
import time
from collections.abc import Iterator

import pytest

from jaxpage.pictures.sources import MediaSources

BODY = bytes(range(200))


class Responses(http.server.BaseHTTPRequestHandler):
    """By path: the body, redirects, errors, endless and slow answers."""

    def do_GET(self) -> None:
        kind = self.path.partition("?")[0]
        if kind.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", kind.removeprefix("/to/").replace("_", "/"))
            self.end_headers()
        elif kind == "/missing":
            self.send_error(404)
        elif kind == "/picture":
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)
        else:  # without a length
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(300):
                    self.wfile.write(BODY[:10])
                    self.wfile.flush()
                    time.sleep(0.05 if kind == "/slow" else 0)
            except OSError:
                pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Responses)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def local(**options) -> MediaSources:
    return MediaSources(**({"domains": ("127.0.0.1",), "seconds": 5.0} | options))


def test_data_urls():
    text = base64.b64encode(BODY).decode()
    assert MediaSources().read(f"data:image/png;base64,{text}") == BODY
    assert MediaSources().read(f"DATA:image/png;base64,{text.replace('=', '%3D')}") == BODY
    for wrong in (f"data:image/png,{text}", "data:image/png;base64", "data:;base64,a*b="):
        with pytest.raises(ValueError, match="data URL"):
            MediaSources().read(wrong)
    with pytest.raises(ValueError, match="more than the 100 bytes"):
        MediaSources(max_bytes=100).read(f"data:image/png;base64,{text}")


@pytest.mark.parametrize("url", ["ftp://a/b", "gopher://a", "/etc/passwd", "", "javascript:1", 5])
def test_other_schemes_are_refused(url):
    with pytest.raises(ValueError, match="URL must"):
        local().read(url)


def test_files_are_read_below_the_allowed_folder_only(tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "allowed-not"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "a b.png").write_bytes(BODY)
    (allowed / "out").symlink_to(other)
    sources = MediaSources(local_path=str(allowed))
    assert sources.read(f"file://{allowed}/a%20b.png") == BODY
    assert sources.read(f"file://localhost{allowed}/a%20b.png") == BODY
    for path in (
        f"{other}/a b.png",
        f"{allowed}/../allowed-not/a b.png",
        f"{allowed}/%2e%2e/allowed-not/a b.png",
        f"{allowed}/out/a b.png",
        "/etc/passwd",
    ):
        with pytest.raises(ValueError, match="is not below allowed_local_media_path"):
            sources.read(f"file://{path}")
    os.mkfifo(allowed / "pipe")
    for name, message in (("none.png", "cannot be read"), ("", "no file"), ("pipe", "no file")):
        with pytest.raises(ValueError, match=message):
            sources.read(f"file://{allowed}/{name}")
    with pytest.raises(ValueError, match="of this machine"):
        sources.read(f"file://elsewhere{allowed}/a b.png")
    with pytest.raises(ValueError, match="more than the 100 bytes"):
        MediaSources(local_path=str(allowed), max_bytes=100).read(f"file://{allowed}/a b.png")
    with pytest.raises(ValueError, match="allowed_local_media_path"):
        MediaSources().read(f"file://{allowed}/a b.png")


def test_hosts_must_be_allowed_by_name(port):
    url = f"http://127.0.0.1:{port}/picture?x=1#y"
    assert local().read(url) == BODY
    for sources in (MediaSources(), local(domains=("example.com",)), local(domains=("127.0.0",))):
        with pytest.raises(ValueError, match="not among allowed_media_domains"):
            sources.read(url)
    for trick in (f"http://127.0.0.1@evil:{port}/picture", "http://evil/?http://127.0.0.1/"):
        with pytest.raises(ValueError, match="not among allowed_media_domains"):
            local().read(trick)


def test_a_redirect_may_not_lead_to_a_private_address(port):
    with pytest.raises(ValueError, match="'127.0.0.1'.*not public"):
        local().read(f"http://127.0.0.1:{port}/to/_picture")
    with pytest.raises(ValueError, match="not among"):
        local().read(f"http://127.0.0.1:{port}/to/http:__169.254.169.254_latest")
    with pytest.raises(ValueError, match="not among"):
        local().read(f"http://127.0.0.1:{port}/to/file:___etc_passwd")


def test_what_does_not_answer_is_an_error(port):
    with pytest.raises(ValueError, match="status 404"):
        local().read(f"http://127.0.0.1:{port}/missing")
    with pytest.raises(ValueError, match="cannot be fetched"):
        local().read("http://127.0.0.1:1/picture")


def test_bytes_and_time_are_limited_also_without_a_length(port):
    with pytest.raises(ValueError, match="more than the 1000 bytes"):
        local(max_bytes=1000).read(f"http://127.0.0.1:{port}/endless")
    with pytest.raises(ValueError, match="more than the 100 bytes"):
        local(max_bytes=100).read(f"http://127.0.0.1:{port}/picture")
    start = time.monotonic()
    with pytest.raises(ValueError, match="cannot be fetched: it took more than 0.3 seconds"):
        local(seconds=0.3).read(f"http://127.0.0.1:{port}/slow")
    assert time.monotonic() - start < 3
