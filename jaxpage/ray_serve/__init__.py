"""Replicas of the server across machines, with Ray Serve (extra `ray`). Ray is imported when it is needed.

serve.yaml names `build_app` as its `import_path`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxpage.config import EngineConfig
from jaxpage.server.options import ServerOptions

if TYPE_CHECKING:
    from ray.serve import Application  # pyright: ignore[reportMissingImports]


def build_app(args: dict[str, Any]) -> Application:
    """The application for these flags of `jaxpage serve`, by name. Raises ValueError or TypeError."""
    require_ray()
    from jaxpage.ray_serve.application import application
    from jaxpage.ray_serve.options import read_args

    return application(*read_args(args))


def run(config: EngineConfig, options: ServerOptions, num_replicas: int) -> None:
    """Serve on the running cluster until a signal. Raises ValueError."""
    require_ray()
    from jaxpage.ray_serve.cluster import serve_on_cluster

    serve_on_cluster(config, options, num_replicas)


def require_ray() -> None:
    """Raise ValueError if Ray Serve is not installed."""
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise ValueError(
            f"--backend ray needs Ray Serve, which is not installed ({error}); pip install 'jaxpage[ray]'"
        ) from None
