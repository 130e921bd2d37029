"""`python -m tests.without_torch MODULE [ARGUMENT...]` is `python -m MODULE [ARGUMENT...]` without torch installed.

transformers imports torch wherever it is installed, which takes most of the start of a process that does not need it.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.modules["torch"] = None
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
