"""The arguments of an application: names and values of `jaxpage serve`'s flags, in a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.config import EngineConfig
from jaxpage.server.options import ServerOptions

# Ray Serve's own proxies do this: see `http_options` in serve.yaml.
_OF_THE_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile", "root_path")


def read_args(args: Mapping[str, Any]) -> tuple[EngineConfig, ServerOptions]:
    """The options of engines and servers. Raises ValueError or TypeError for invalid ones."""
    args = {name.replace("-", "_"): value for name, value in args.items()}
    fields = {f.name for f in dataclasses.fields(ServerOptions)}
    misplaced = [name for name in _OF_THE_PROXY if name in args]
    if misplaced:
        raise ValueError(f"{', '.join(misplaced)}: Ray Serve's http_options say this, not args")
    server = ServerOptions(**{n: _plain(n, v) for n, v in args.items() if n in fields})
    engine = {name: value for name, value in args.items() if name not in fields}
    return EngineConfig.from_options(**engine), for_replicas(server)


def for_replicas(options: ServerOptions) -> ServerOptions:
    """The options for servers that share their clients. Raises ValueError for unsupported ones.

    The file of keys is read here, so other machines do not need it. TLS files are those of the proxies' machines, and
    folders of adapters those of the replicas'. If all TLS files are here they are checked, as the proxies would report
    a fault only after the start.
    """
    files = [file for file in (options.ssl_certfile, options.ssl_keyfile) if file is not None]
    if all(map(os.path.exists, files)):
        _ = options.ssl_context
    if options.max_stored_responses not in (0, ServerOptions.max_stored_responses):
        raise ValueError(
            f"max_stored_responses={options.max_stored_responses}: with Ray responses are not stored, as a replica "
            "knows nothing of what another one answered; leave it out"
        )
    return dataclasses.replace(
        options, max_stored_responses=0, api_key=options.keys(), api_key_file=None
    )


def actor_options(cluster: Mapping[str, float], config: EngineConfig) -> dict[str, Any]:
    """The resources that Ray reserves for a replica: as many of the cluster's devices as it uses.

    `cluster`: resources by Ray's names; "TPU" counts chips. Raises ValueError for an engine of several hosts.
    """
    if config.nnodes > 1:
        raise ValueError(
            f"nnodes={config.nnodes}: with Ray each replica has one host; leave it out"
        )
    num_devices = (config.tensor_parallel_size or 1) * config.data_parallel_size
    if cluster.get("TPU"):
        return {"num_cpus": 1, "resources": {"TPU": num_devices}}
    if cluster.get("GPU"):
        return {"num_cpus": 1, "num_gpus": num_devices}
    return {"num_cpus": 1}


def _plain(name: str, value: Any) -> Any:
    """Converts a YAML value to a type of `ServerOptions`."""
    if isinstance(value, list):
        return tuple(value)
    lists = ("api_key", "served_model_name", "allowed_origins", "lora_modules")
    if isinstance(value, str) and name in lists:
        return (value,)
    return Path(value) if name in ("api_key_file", "profiler_dir") and value else value
