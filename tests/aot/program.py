"""One program to be compiled for a chip that is not there, and the hash by which it is known again.

The hash is of the program's text as it goes to the compiler, without what does not change the result: source locations,
also those inside kernels, and the numbers that a process counts its kernels with.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

# Of the dump of a Mosaic GPU kernel: how many kernels the process has lowered before.
_COUNTED = re.compile(r'mosaic_gpu\.dump_basename = "[^"]*"')


@dataclass(frozen=True, kw_only=True)
class Program:
    """`look(compiled, log)`: what a test wants to know, as JSON; `log`: what the compiler wrote meanwhile."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    look: Callable[[jax.stages.Compiled, str], dict[str, Any]]
    is_refused: bool = False  # it cannot be compiled, and should not be
    observers: tuple[ModuleType, ...] = ()  # further modules that `look` reads the text with


def largest_steps(
    job: CompileJob, name: str, look: Callable[..., dict[str, Any]], *observers: ModuleType
) -> Iterator[Program]:
    """The largest decode step and the largest other one. `look(job, num_tokens, compiled, log)`."""
    decode = [bucket for bucket in job.spec.buckets if bucket.decode][-1]
    for bucket in (decode, job.spec.buckets[-1]):
        yield Program(
            name=f"{name} {bucket.name}",
            lower=partial(_lower_step, job, bucket.name),
            look=partial(look, job, bucket.num_tokens),
            observers=observers,
        )


def _lower_step(job: CompileJob, name: str) -> jax.stages.Lowered:
    with job.spec.on_target():
        return job.lowerings.programs[name]()


def hash_of(lowered: jax.stages.Lowered) -> str:
    """Of the lowered text and the compiler's options. TPU kernels have no locations if the process was told so."""
    texts, options = [], lowered._lowering._compiler_options_kvs
    module = lowered.compiler_ir()
    assert module is not None
    with module.context:
        copy = module.operation.clone(ip=False)
        copy.walk(partial(_take_gpu_kernel, texts))
        texts.append(copy.get_asm(enable_debug_info=False))
    return _sha(*texts, repr(sorted(options)))


def hash_of_observer(look: Callable[..., Any], *modules: ModuleType) -> str:
    """Of the code that reads what is compiled, `modules` too: what it found is worth nothing once it looks for
    something else.
    """
    from jaxpage.aot import contents, hlo
    from tests.aot import ptxas

    while isinstance(look, partial):
        look = look.func
    sources = [inspect.getsource(each) for each in (contents, hlo, ptxas, look, *modules)]
    return _sha(*(code_of(ast.parse(textwrap.dedent(source))) for source in sources))


def code_of(tree: ast.Module) -> str:
    """Without comments and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.unparse(tree)


def _take_gpu_kernel(texts: list[str], operation: Any) -> Any:
    """A Mosaic GPU kernel is bytecode in an attribute, and a hash of it: its text instead goes to `texts`."""
    from jax._src.interpreters import mlir
    from jax._src.lib import mosaic_gpu_dialect
    from jax.extend.mlir import ir

    config = operation.attributes.get("mhlo.backend_config", None)
    if config is not None and operation.name == "stablehlo.custom_call":
        entries = {entry.name: entry.attr for entry in ir.DictAttr(config)}
        if "module" in entries:
            with mlir.make_ir_context() as context:
                mosaic_gpu_dialect.register_dialect(context)
                context.allow_unregistered_dialects = True
                kernel = ir.Module.parse(ir.StringAttr(entries.pop("module")).value_bytes)
                texts.append(_COUNTED.sub("", kernel.operation.get_asm(enable_debug_info=False)))
            entries.pop("kernel_hash", None)
            operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
    return ir.WalkResult.ADVANCE


def _sha(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
