"""`jaxpage serve --backend ray`: runs an application on the running cluster until a signal."""

from __future__ import annotations

import logging
import signal
import threading

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from jaxpage.config import EngineConfig
from jaxpage.ray_serve.application import application
from jaxpage.ray_serve.options import for_replicas
from jaxpage.server.options import ServerOptions

logger = logging.getLogger(__name__)

NAME = "jaxpage"


def serve_on_cluster(config: EngineConfig, options: ServerOptions, num_replicas: int) -> None:
    """Serve until SIGTERM or SIGINT; then running requests have `shutdown_timeout` seconds. Raises ValueError."""
    shared = for_replicas(options)  # invalid options are reported before anything is started
    _join()
    try:
        serve.start(
            http_options={
                "host": options.host,
                "port": options.port,
                "root_path": options.root_path,
                "ssl_certfile": options.ssl_certfile and str(options.ssl_certfile),
                "ssl_keyfile": options.ssl_keyfile and str(options.ssl_keyfile),
            }
        )
        app = application(config, shared, num_replicas)
        try:
            serve.run(app, name=NAME, route_prefix="/")
            logger.info(
                "serving   %s by %d replicas on port %d", config.model, num_replicas, options.port
            )
            _wait_for_signal()
        finally:
            serve.delete(NAME)
    finally:
        ray.shutdown()


def _join() -> None:
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError:
        raise ValueError(
            "there is no Ray cluster to join; `ray start --head` starts one on this machine, "
            "and RAY_ADDRESS names one that is elsewhere"
        ) from None


def _wait_for_signal() -> None:
    has_come = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: has_come.set())
    has_come.wait()
    logger.info("running requests may end")
