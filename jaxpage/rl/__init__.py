"""Sampling for reinforcement learning, from the trainer's own parameters."""

from jaxpage.rl.logprobs import logprobs
from jaxpage.rl.module import load_module
from jaxpage.rl.parity import ParityError, ParityReport
from jaxpage.rl.rollout import Padded, Rollout, to_padded
from jaxpage.rl.sampler import Sampler
from jaxpage.rl.scoring import Scored
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.rl.session import Session, collect

__all__ = [
    "GroupSeeds",
    "Padded",
    "ParityError",
    "ParityReport",
    "Rollout",
    "Sampler",
    "Scored",
    "Session",
    "collect",
    "load_module",
    "logprobs",
    "to_padded",
]
