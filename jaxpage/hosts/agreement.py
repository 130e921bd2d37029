"""What must be the same on all hosts of an engine: versions, options, shapes, sizes. Checked before anything runs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxpage.config import EngineConfig
from jaxpage.engine_spec import EngineSpec
from jaxpage.hosts.group import Hosts, differences
from jaxpage.runner.fingerprint import machine_fingerprint
from jaxpage.speculation import SpeculativeConfig

# Each host has its own copy of the files, and its own identity.
_OF_ONE_HOST = (
    *("model", "tokenizer", "hf_config_path", "download_dir", "hf_token", "chat_template"),
    *("compilation_cache_dir", "record_calls", "use_tqdm_on_load", "node_rank"),
    *("options_without_effect", "mesh"),
)
# Properties of the machine; programs may be compiled for another processor there.
_OF_ONE_MACHINE = ("cores", "processor")


def check_same(hosts: Hosts, options: EngineConfig, spec: EngineSpec, *, flags: str) -> None:
    """Raises ValueError on the leader if hosts differ, and HostLostError on the others. `flags`: the compiler's."""
    fields = dataclasses.fields(EngineConfig)
    machine = machine_fingerprint(spec.device, flags)
    mine = (
        {name: text for name, text in machine.items() if name not in _OF_ONE_MACHINE}
        | {f.name: _as_text(getattr(options, f.name)) for f in fields if f.name not in _OF_ONE_HOST}
        | {name: text for name, text in spec.fingerprint().items() if name != "host"}
    )

    mine = {
        name: re.sub(" at 0x[0-9a-f]+", "", text) for name, text in mine.items()
    }  # of functions

    def decide(said: list[dict[str, Any]]) -> dict[str, Any]:
        found = differences(said)
        if found is not None:
            raise ValueError(f"the hosts must be started alike, but {found}")
        return {}

    hosts.agree(mine, decide)


def _as_text(option: Any) -> str:
    if isinstance(option, SpeculativeConfig):  # the draft model is in a folder of the host, too
        option = vars(option) | {"model": None}
    return repr(option)


def smallest(hosts: Hosts, mine: dict[str, int]) -> dict[str, int]:
    """The minimum of each number over all hosts."""
    return hosts.agree(mine, lambda said: {name: min(each[name] for each in said) for name in mine})


def wait_for_all(hosts: Hosts) -> None:
    """Wait until every host has reached this point."""
    hosts.agree({}, lambda said: {})
