"""What the hosts of an engine compare before anything runs."""

import shutil
from typing import Any

from jaxpage.composition import spec_of_this_machine
from jaxpage.config import EngineConfig
from jaxpage.hosts.agreement import check_same
from tests import checkpoints


class OneHost:
    """Keeps what a host says."""

    def agree(self, mine: dict[str, Any], decide: Any) -> dict[str, Any]:
        self.said = mine
        return {}


def said_with(path, drafts, number: int = 2) -> dict[str, Any]:
    speculative = {"model": str(drafts), "num_speculative_tokens": number}
    options = EngineConfig(model=str(path), speculative_config=speculative)
    host: Any = OneHost()
    check_same(host, options, spec_of_this_machine(options), flags="")
    return host.said


def test_hosts_may_have_their_models_in_different_folders(tmp_path):
    path = checkpoints.build("qwen2", 0, tmp_path / "one", num_hidden_layers=1)
    other = shutil.copytree(path, tmp_path / "other")
    said = said_with(path, path)
    assert said_with(other, other) == said
    assert said_with(path, path, number=3) != said
