"""The page at `/`: a chat playground and a live view of the engine, made of the static files in the folder `page`.

Knows files and headers. The page uses the server's API like any other client.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from jaxpage.async_llm import AsyncLLM, EngineDeadError
from jaxpage.server.engine_view import EngineView
from jaxpage.server.errors import ApiError

INDEX = "index.html"
# Not guessed from the system's table: browsers do not run a module that is declared as plain text.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other hosts, nothing inline, and no text parsed as HTML.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",  # pictures that the user adds
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A static file."""

    content: bytes
    headers: dict[str, str]


def page_router(llm: AsyncLLM) -> APIRouter:
    """Routes `/`, `/page/assets/...` and `/page/engine`. Only the last has data of this server."""
    router = APIRouter(include_in_schema=False)
    assets = _load_assets()
    view = EngineView(llm)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _respond(assets[INDEX], request)

    @router.api_route("/page/assets/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise ApiError(404, f"the page has no file {name[:100]!r}")
        return _respond(assets[name], request)

    @router.get("/page/engine")
    async def engine() -> Response:
        try:
            body = await view.body()
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from error
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    return router


def _load_assets() -> dict[str, Asset]:
    """All files of the page by name."""
    assets = {}
    for file in files("jaxpage.server").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is None:  # such as a cache folder
            continue
        content = file.read_bytes()
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": media_type,
            # Browsers revalidate each time, and get a 304 if nothing has changed.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        assets[file.name] = Asset(content=content, headers=headers)
    return assets


def _respond(asset: Asset, request: Request) -> Response:
    known = [
        tag.strip().removeprefix("W/")
        for tag in request.headers.get("if-none-match", "").split(",")
    ]
    if asset.headers["ETag"] in known:
        return Response(status_code=304, headers=asset.headers)
    return Response(asset.content, headers=asset.headers)
