"""Errors that a caller gets instead of an answer."""

from __future__ import annotations


class StepFailedError(RuntimeError):
    """The step that computed this request failed. Other requests and the engine continue."""


class EngineDeadError(RuntimeError):
    """The engine has stopped, because several steps failed in a row or it was shut down; it takes no more requests."""


class EngineAsleepError(RuntimeError):
    """Weights or KV pool are not on the devices, so nothing can be computed until `wake_up`."""
