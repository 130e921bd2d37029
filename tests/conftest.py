"""Settings of every test run. They must precede the first `import jax`, so nothing of ours is imported here.

Tests run on the CPU with eight fake devices, offline, with caches in a folder per session. `-m gpu` and `-m tpu` leave
the choice of the platform to JAX. These, `aot`, `browser`, `deep` and `ray` run only if `-m` selects them.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

MANY_MAPS = 30_000  # of memory
_DEVICE_MARKERS = ("gpu", "tpu")
_MARKERS_TO_ASK_FOR = (*_DEVICE_MARKERS, "aot", "browser", "deep", "ray")
_ONE_ENGINE = ("tests/server/", "tests/structured_outputs/")  # folders whose files share an engine


def _asked_for(config: pytest.Config, marker: str) -> bool:
    """Whether the `-m` expression selects `marker`; `not gpu` does not."""
    expression = config.getoption("markexpr")
    return bool(re.search(rf"(?<!not )\b{marker}\b", expression))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unless-passed",
        action="store_true",
        help="leave out slow tests of kernels that passed with the same sources (tests/kernels/records)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole fast core in two processes, if pytest-xdist is installed; other selections run in one."""
    options = config.option
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    is_fast_core = is_whole and options.markexpr == "not slow"
    is_worker = hasattr(config, "workerinput")
    if not is_fast_core or is_worker or options.usepdb or options.collectonly:
        return
    if config.pluginmanager.hasplugin("xdist") and options.numprocesses is None:
        options.numprocesses, options.dist = 2, "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """For `loadfile`: one process runs all tests of a file, and all files that share an engine."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in _ONE_ENGINE if file.startswith(folder)), file)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all modules are imported: little of what that makes is garbage
    cache = tempfile.mkdtemp(prefix="jaxpage-tests-")
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    os.environ.update(
        XDG_CACHE_HOME=cache,
        HF_HOME=os.path.join(cache, "huggingface"),
        JAX_COMPILATION_CACHE_DIR=os.path.join(cache, "jax"),
        # Many tests build the same model. Recompiling a small program is as fast as writing and reading it.
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TQDM_DISABLE="1",
        TOKENIZERS_PARALLELISM="false",
        # torch only runs tiny models, as an oracle: several threads would mostly wait for each other.
        OMP_NUM_THREADS="1",
        # These turn silent upcasts to float32 and silent broadcasts into errors.
        JAX_NUMPY_DTYPE_PROMOTION="strict",
        JAX_NUMPY_RANK_PROMOTION="raise",
    )
    if not any(_asked_for(config, marker) for marker in _DEVICE_MARKERS):
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = ["--xla_force_host_platform_device_count=8"]
        if not _asked_for(config, "aot"):
            flags += _fast_compilation()
        os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests whose marker was not selected, so that they do not count as skipped."""
    unwanted = [m for m in _MARKERS_TO_ASK_FOR if not _asked_for(config, m)]
    left_out = {item for item in items if any(item.get_closest_marker(m) for m in unwanted)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Let the garbage collector scan long-lived objects less often: modules, and jax's program caches."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
    if "jax" in sys.modules:
        _share_contexts_of_mlir()


def _share_contexts_of_mlir() -> None:
    """Lower ten programs of a thread in the same context, as jax does since 0.11.2: loading MLIR's dialects into a new
    one takes longer than lowering a small program.
    """
    from jax._src.interpreters import mlir

    if hasattr(mlir, "_create_ir_context"):  # jax does it
        return
    create, mine = mlir.make_ir_context, threading.local()

    def make_ir_context():
        if getattr(mine, "uses_left", 0) == 0:
            mine.context, mine.uses_left = create(), 10
        mine.uses_left -= 1
        return mine.context

    mlir.make_ir_context = make_ir_context


def _fast_compilation() -> list[str]:
    """XLA:CPU flags for a quarter of the compile time, and slower programs. Tests that need programs as users have them
    use `production_compiler`.
    """
    flags = [
        "--xla_backend_optimization_level=0",
        # Each module as a whole: on few cores, compiling its parts in parallel costs more than it saves.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if version("jaxlib") < "0.11":  # later versions always use fusion emitters
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags


@pytest.fixture(scope="session")
def as_users_compile():
    """A context in which programs are compiled as for users, also in subprocesses: slower to compile, faster to run."""
    return _production_compiler


@pytest.fixture(scope="module")
def production_compiler():
    """The same for all programs of a test module, from the first test that uses it."""
    with _production_compiler():
        yield


@pytest.fixture(scope="module")
def fast_compiler():
    """For tests that run beside `aot` ones, which do without `_fast_compilation`: the same for CPU programs only."""
    import jax

    if jax.default_backend() != "cpu":
        yield
        return
    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    with _compiled_with(options):
        yield


@contextmanager
def _production_compiler() -> Iterator[None]:
    """What jax has compiled before is not compiled again."""
    options = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
    if version("jaxlib") < "0.11":
        options["xla_cpu_use_fusion_emitters"] = True
    flags = [f for f in os.environ["XLA_FLAGS"].split() if f not in _fast_compilation()]
    with pytest.MonkeyPatch.context() as patch, _compiled_with(options):
        # For processes of their own, and for the names of programs in caches.
        patch.setenv("XLA_FLAGS", " ".join(flags))
        yield


@contextmanager
def _compiled_with(options: dict[str, int | bool]) -> Iterator[None]:
    """XLA's options of what is compiled meanwhile in this process."""
    import jax
    from jax._src import compiler  # there is no public name for the options of every `jax.jit`

    # XLA reads XLA_FLAGS once per process, here at the latest: so it makes no difference which test is the first.
    jax.devices()
    options_of_flags = compiler.get_compile_options

    def overridden(*args, env_options_overrides=None, **kwargs):
        overrides = options | (env_options_overrides or {})
        return options_of_flags(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", overridden)
        yield


@pytest.fixture
def fresh_cache():
    """Disables the program cache that tests share: an `LLM` sets up its own."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {
        "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
        "jax_persistent_cache_min_compile_time_secs": jax.config.jax_persistent_cache_min_compile_time_secs,
    }
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def few_programs_in_memory():
    """Frees programs: XLA:CPU maps each one's code separately, and Linux limits a process to 65,530 maps."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The smallest checkpoint with a tokenizer."""
    from jaxpage import tiny

    return str(tiny.build(tmp_path_factory.mktemp("tiny") / "tiny"))
