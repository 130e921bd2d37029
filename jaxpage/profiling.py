"""jax's profiler under vLLM's names: a trace of what host and devices do, for TensorBoard, XProf or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

DEFAULT_FOLDER = "jaxpage_profile"


def start_trace(folder: str | Path | None) -> None:
    """Trace this process from now on. Raises RuntimeError if that is already being done."""
    jax.profiler.start_trace(str(folder or DEFAULT_FOLDER))


def stop_trace() -> None:
    """Write the trace. Raises RuntimeError if none was started."""
    jax.profiler.stop_trace()


class ProfilingCalls:
    """Methods of `LLM`."""

    def start_profile(self, profile_prefix: str | Path | None = None) -> None:
        """Trace everything this process does until `stop_profile`.

        jax writes a folder where vLLM writes files: `profile_prefix` is that folder, by default "jaxpage_profile".
        Raises RuntimeError if a trace has already been started.
        """
        start_trace(profile_prefix)

    def stop_profile(self) -> None:
        """Write the trace. Raises RuntimeError if none was started."""
        stop_trace()
