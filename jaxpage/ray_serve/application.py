"""The application that Ray Serve deploys."""

from __future__ import annotations

from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve import Application  # pyright: ignore[reportMissingImports]

from jaxpage.config import EngineConfig
from jaxpage.ray_serve.deployments import Engine, Front
from jaxpage.ray_serve.options import actor_options
from jaxpage.server.options import ServerOptions

# The engine limits its requests, so Ray need not.
_MANY_REQUESTS = 2**16


def application(
    config: EngineConfig, options: ServerOptions, num_replicas: int | None = None
) -> Application:
    """One engine per replica, and the deployment in front of them. Call it where a cluster is joined."""
    more: dict[str, Any] = {} if num_replicas is None else {"num_replicas": num_replicas}
    engine = serve.deployment(
        name="Engine",
        max_ongoing_requests=_MANY_REQUESTS,
        request_router_config={"request_router_class": "jaxpage.ray_serve.router.PrefixRouter"},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options=actor_options(ray.cluster_resources(), config),
        **more,
    )(Engine)
    front = serve.deployment(
        name="Front",
        max_ongoing_requests=_MANY_REQUESTS,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Front))
    return front.bind(engine.bind(config, options), options.max_body_size)
