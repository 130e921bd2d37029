"""The application that Ray Serve deploys."""

from __future__ import annotations

from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.serve import Application  # pyright: ignore[reportMissingImports]

from jaxpage.config import EngineConfig
from jaxpage.ray_serve.deployments import Engine, Front
from jaxpage.ray_serve.options import actor_options
from jaxpage.server.options import ServerOptions


def application(
    config: EngineConfig, options: ServerOptions, num_replicas: int | None = None
) -> Application:
    """One engine for each replica and what is before them. To be called where a cluster is joined."""
    more: dict[str, Any] = {} if num_replicas is None else {"num_replicas": num_replicas}
    engine = Engine.options(
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        ray_actor_options=actor_options(ray.cluster_resources(), config.tensor_parallel_size),
        **more,
    )
    front = Front.options(graceful_shutdown_timeout_s=options.shutdown_timeout)
    return front.bind(engine.bind(config, options), options.max_body_size)
