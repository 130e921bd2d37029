"""Is every kernel correct on this device? Compares each with float64 on the host, with NaN where it must not read."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.bench import attention_peers, delta_rule, oracle
from jaxpage.bench.kernel_check import SAME, Check
from jaxpage.bench.results import Context, Result, error_summary, failed, measured, missing
from pallas_kernels.block_copy import cases as copy_cases
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.kv_write.quantized import FORMATS, QuantizedPool
from pallas_kernels.kv_write.storage import to_storage
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.matmul import cases as matmul_cases
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.quant_matmul import cases as quant_cases
from pallas_kernels.quant_matmul import reference as quant_definition
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, round_rows
from pallas_kernels.rope import cases as rope_cases
from pallas_kernels.rope import reference as rope_definition
from pallas_kernels.tile_sizes import tuned_sizes

OPERATIONS = (
    "paged_attention",
    "matmul",
    "quant_matmul",
    "grouped_matmul",
    "block_copy",
    "kv_write",
    "rope",
    "delta_rule",
    "mamba2",
)
ROWS = ("q", "pool", "block_table", "kv_lens", "query_starts")
THREADS = 8  # to compile with

# Rows of one query; the last has none. Lengths near the boundaries of blocks, tiles, parts and groups of parts.
DECODE = dict(
    query_lens=(1,) * 12 + (0,),
    kv_lens=(1, 63, 64, 65, 128, 255, 256, 257, 1100, 2047, 2048, 2049, 0),
)
MIXED = dict(query_lens=(1, 150, 1, 33, 0, 1, 2), kv_lens=(700, 150, 1, 300, 0, 513, 129))
TINY_DECODE = dict(query_lens=(1, 1, 0), kv_lens=(17, 64, 0))
TINY_MIXED = dict(query_lens=(1, 9, 0, 2), kv_lens=(33, 20, 0, 5))


def measure(context: Context) -> Iterator[Result]:
    """One result for each check; kernels for other platforms are reported as missing."""
    platform, absent = attention_peers.kernels_of(jax.devices()[0])
    for operation in OPERATIONS:
        for module, reason in absent.items():
            if _exists(operation, module):
                yield missing(f"{operation} ({module})", "", reason)
    # On the host, because compiling the many small programs that create arguments would take minutes for a GPU.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        products = _attention_checks, _matmul_checks, _quant_checks, _grouped_checks
        kinds = *products, _copy_checks, _write_checks, _rope_checks, delta_rule.checks
        checks = [check for kind in kinds for check in kind(platform, context.tiny)]
    for check in checks:
        check.arguments = jax.device_put(check.arguments, jax.devices()[0])
    # Compiled in parallel, which takes most of the time; run one by one, in order.
    with ThreadPoolExecutor(THREADS) as pool:
        compiled = [pool.submit(_compile, check) for check in checks]
        for check, future in zip(checks, compiled, strict=True):
            try:
                out = jax.block_until_ready(future.result()(*check.arguments))
                yield measured(check.name, check.error(out), check.unit, check.bar)
            except NotImplementedError as refusal:  # raised by the kernel: an unsupported case
                yield missing(check.name, check.unit, str(refusal), check.bar)
            except Exception as error:  # any error of a compiler or a device
                traceback.print_exc()
                yield failed(check.name, error_summary(error), check.bar)


def _compile(check: Check) -> Any:
    return jax.jit(check.run).lower(*check.arguments).compile()


def _exists(operation: str, module: str) -> bool:
    return importlib.util.find_spec(f"pallas_kernels.{operation}.{module}") is not None


def _modules(operation: str, platform: str) -> list[tuple[str, ModuleType]]:
    """The platform's own kernel, if the operation has one, and the XLA implementation."""
    names = [name for name in (platform, "xla") if _exists(operation, name)]
    return [(n, importlib.import_module(f"pallas_kernels.{operation}.{n}")) for n in names]


def _tuned(operation: str, module_name: str) -> dict[str, Any]:
    """The tile sizes that an engine uses for the operation's kernel on this device."""
    if module_name == "xla":
        return {}
    return {"sizes": tuned_sizes(operation, module_name, jax.devices()[0].device_kind)}


def attention_table(tiny: bool) -> list[Case]:
    """Head dims, head counts, pools and masks, for rows of one query and for mixed rows."""
    no_rows = partial(Case, name="", query_lens=(), kv_lens=(), block_size=64, dtype="bfloat16")
    if tiny:
        small = no_rows(num_heads=4, num_kv_heads=2, head_dim=64)
        return [small, replace(small, format="int8", window=20, soft_cap=5.0, sinks=True)]
    wide = no_rows(num_heads=16, num_kv_heads=2, head_dim=128)
    many = replace(wide, num_heads=32, num_kv_heads=8)
    formats = ("int8", "fp8_e4m3", "int4")
    return [
        *(replace(wide, head_dim=dim) for dim in (64, 96, 128, 192, 256)),
        *(replace(many, head_dim=dim) for dim in (64, 128)),
        *(replace(wide, format=format, head_dim=dim) for format in formats for dim in (64, 128)),
        replace(many, format="int8"),
        replace(wide, window=100),
        replace(wide, soft_cap=5.0),
        replace(wide, sinks=True),
    ]


def _attention_checks(platform: str, tiny: bool) -> Iterator[Check]:
    (module_name, module), *_ = _modules("paged_attention", platform)
    kinds = {"decode": TINY_DECODE if tiny else DECODE, "mixed": TINY_MIXED if tiny else MIXED}
    for shape in attention_table(tiny):
        for kind, lens in kinds.items():
            decode = kind == "decode"
            # In decoding query r belongs to row r, so the empty row has one too.
            case = replace(shape, **lens, num_padding_tokens=1 if decode else 9)
            if platform == "tpu":
                case = replace(case, block_size=128)  # the engine's default there
            name = f"paged_attention ({module_name}) {kind}, {_describe(case)}"
            yield _attention_check(name, module, attention_cases.arguments(case), decode)


def _describe(case: Case) -> str:
    parts = [f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"]
    parts += [case.format or case.dtype]
    parts += [f"window {case.window}"] if case.window else []
    parts += [f"soft cap {case.soft_cap:g}"] if case.soft_cap else []
    parts += ["sinks"] if case.sinks else []
    return ", ".join(parts)


def _attention_check(name: str, module: ModuleType, arguments: dict, decode: bool) -> Check:
    options = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
    options |= _tuned("paged_attention", module.__name__.rpartition(".")[2])
    attend = partial(module.paged_attention, one_query_per_row=decode, **options)
    given = {name: arguments[name] for name in (*ROWS, "sinks") if name in arguments}
    expected = arguments
    if module.__name__.endswith(".tpu"):
        attend, given, expected = _writing(attend, arguments, given)

    def error(out: jax.Array) -> float:
        return oracle.worst_row(out, arguments["query_starts"], oracle.attention(expected))

    return Check(name, lambda given: attend(**given), (given,), error)


def _writing(attend: Callable[..., Any], arguments: dict, given: dict) -> tuple:
    """A TPU kernel also writes keys and values: random ones, which the float64 pool contains too."""
    from pallas_kernels.paged_attention.tpu_layout import to_tpu

    q, pool = arguments["q"], arguments["pool"]
    if isinstance(pool, QuantizedPool) and pool.scale_zero is not None:  # bits, as on a CPU
        pool = replace(pool, scale_zero=jax.lax.bitcast_convert_type(pool.scale_zero, q.dtype))
    shape = (q.shape[0], pool.shape[2] // 2, q.shape[2])
    k, v = (jax.random.normal(jax.random.key(i), shape, q.dtype) for i in (1, 2))
    table, kv_lens, starts = (np.asarray(arguments[name]) for name in ROWS[2:])
    slots = np.full(q.shape[0], pool.shape[0] * pool.shape[1], np.int32)  # padding: dropped
    for row, kv_len in enumerate(kv_lens):
        tokens = np.arange(starts[row], starts[row + 1])
        at = kv_len - (starts[row + 1] - tokens)
        slots[tokens] = table[row, at // pool.shape[1]] * pool.shape[1] + at % pool.shape[1]
    written = arguments | {"pool": write_kv(pool, k, v, jnp.asarray(slots))}
    given = given | {"k": k, "v": v, "pool": to_tpu(pool)}
    return lambda **given: attend(**given)[0], given, written


def _matmul_checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Few tokens, of edge cases and of a model's layers."""
    layers = [
        matmul_cases.Case(name=f"{num_in}-to-{num_out}", num_in=num_in, num_out=num_out, bias=True)
        for num_in, num_out in quant_cases.LAYERS["3b"]
    ]
    cases = matmul_cases.SMALL[::3] if tiny else [*matmul_cases.SMALL, *layers]
    for module_name, module in _modules("matmul", platform):
        sizes = _tuned("matmul", module_name)

        def run(x, weight, bias, module=module, sizes=sizes):
            return module.matmul(x, weight, bias=bias, **sizes)

        for case in cases:
            x, weight, bias = matmul_cases.arguments(case).values()
            want = oracle.float64(x) @ oracle.float64(weight).T
            if bias is not None:
                want += oracle.float64(bias)
            name = f"matmul ({module_name}) {case.name}"
            yield Check(name, run, (x, weight, bias), partial(_error, want))


def _quant_checks(platform: str, tiny: bool) -> Iterator[Check]:
    formats = {"int8": None, "int4": 128, "fp8_e4m3": None}  # format: group size
    large = [
        quant_cases.Case(
            name=f"{format}-{num_in}-to-{num_out}",
            num_tokens=64,
            num_in=num_in,
            num_out=num_out,
            format=format,
            group_size=group_size,
        )
        for num_in, num_out in quant_cases.LAYERS["3b"][2:]
        for format, group_size in formats.items()
    ]
    cases = quant_cases.SMALL[::5] if tiny else [*quant_cases.SMALL, *large]
    inputs = [(case, *quant_cases.arguments(case)) for case in cases]
    errors = [partial(_error, _product(*given)) for given in inputs]
    for module_name, module in _modules("quant_matmul", platform):
        sizes = _tuned("quant_matmul", module_name)
        for (case, *arguments), error in zip(inputs, errors, strict=True):
            run = partial(module.quant_matmul, round_x=case.round_x, **sizes)
            name = f"quant_matmul ({module_name}) {case.name}"
            yield Check(name, run, tuple(arguments), error)


def _product(case: quant_cases.Case, x: jax.Array, weight: QuantizedWeight) -> np.ndarray:
    """float64[T, num_out]"""
    if case.round_x:
        integers, scale = round_rows(x)
        x = integers.astype(jnp.float32) * scale
    w = oracle.float64(quant_definition.dequantize(weight))
    return oracle.float64(x) @ w[:, : x.shape[1]].T


def _error(expected: np.ndarray, out: jax.Array) -> float:
    return oracle.relative(oracle.float64(out), expected)


def _grouped_checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Experts with many, few and no rows. Rows without an expert are NaN, or their scale is; results must be 0."""
    small = grouped_cases.SMALL
    for module_name, module in _modules("grouped_matmul", platform):
        product = partial(module.grouped_matmul, **_tuned("grouped_matmul", module_name))

        def run(x, weights, group_sizes, row_scale=None, product=product):
            return product(x, weights, group_sizes, row_scale=row_scale)

        for case in (small[0], small[-1]) if tiny else small:
            arguments = grouped_cases.arguments(case)
            x, weights = oracle.float64(arguments["x"]), arguments["weights"]
            if case.dtype == "int8":
                x = x * oracle.float64(arguments["row_scale"])
            if case.format is not None:
                weights = jax.vmap(quant_definition.dequantize)(weights)
            weights = oracle.float64(weights)
            *of_experts, rest = np.split(x, np.cumsum(case.group_sizes))
            products = [rows @ w.T for rows, w in zip(of_experts, weights, strict=True)]
            want = np.concatenate([*products, np.zeros((len(rest), case.num_outputs))])
            name = f"grouped_matmul ({module_name}) {case.name}"
            names = ("x", "weights", "group_sizes", "row_scale")
            given = tuple(arguments[each] for each in names if each in arguments)
            yield Check(name, run, given, partial(_error, want))


def _copy_checks(platform: str, tiny: bool) -> Iterator[Check]:
    """All lists of copies, padded to the same length, in pools of every kind: no byte may differ."""
    lists = [copies.pairs for copies in copy_cases.COPIES[:: 5 if tiny else 1]]
    longest = max(map(len, lists))
    pairs = np.array([x + copy_cases.PADDING * (longest - len(x)) for x in lists], np.int32)
    for module_name, module in _modules("block_copy", platform):
        kinds = [
            pool for pool in copy_cases.POOLS if (pool.layout == "tpu") == (module_name == "tpu")
        ]
        for pool in kinds[:1] if tiny else kinds:

            def run(layers, pairs, module=module):
                return [module.copy_blocks(layers, p[:, 0], p[:, 1]) for p in pairs]

            def moved(old: jax.Array, sources: np.ndarray, destinations: np.ndarray) -> np.ndarray:
                new = np.array(old)
                new[destinations] = new[sources]
                return new

            layers = copy_cases.layers(pool)
            wanted = [jax.tree.map(lambda x, p=p: moved(x, *p.T), layers) for p in pairs]
            error = partial(_bytes_differ, wanted, first=1)  # without the null block
            name = f"block_copy ({module_name}) {pool.name}"
            yield Check(name, run, (layers, jnp.asarray(pairs)), error, SAME, "bytes differ")


def _write_checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Permuted slots receive the keys and values as `to_storage` converts them; no other slot changes, but for the null
    block's.
    """
    (module_name, module), *_ = _modules("kv_write", platform)
    for format in ("int8",) if tiny else (None, *FORMATS):
        case = Case(name="", query_lens=(1,), kv_lens=(400,), dtype="bfloat16", format=format)
        pool = attention_cases.arguments(case)["pool"]
        shape = (50, case.num_kv_heads, case.head_dim)
        k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
        num_slots = pool.shape[0] * pool.shape[1]
        slots = np.random.default_rng(0).permutation(num_slots)[: shape[0]].astype(np.int32)

        def error(out, k=k, v=v, pool=pool, slots=slots) -> float:
            def put(old: jax.Array, new: jax.Array) -> np.ndarray:
                want = np.array(old)
                want.reshape(-1, *want.shape[2:])[slots] = new
                return want

            kv = jnp.stack([k, v], axis=2).reshape(len(slots), -1, k.shape[2])
            want = jax.tree.map(put, pool, jax.jit(to_storage)(kv, pool))
            return _bytes_differ(want, out, first=1)  # without the null block

        name = f"kv_write ({module_name}) {format or case.dtype}"
        arguments = (pool, k, v, jnp.asarray(slots))
        yield Check(name, module.write_kv, arguments, error, SAME, "bytes differ")


def _rope_checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Queries and keys of every kind of RoPE, split from values."""
    for module_name, module in _modules("rope", platform):
        for case in rope_cases.CASES[:: 5 if tiny else 1]:
            arguments = rope_cases.arguments(case)
            options = {"heads": case.heads, "interleaved": case.interleaved}
            exactly = {name: oracle.float64(x) for name, x in arguments.items()}
            with jax.enable_x64(True):
                parts = rope_definition.split_and_rotate(**exactly, **options)

            def run(joined, cos, sin, module=module, options=options):
                parts = module.split_and_rotate(joined=joined, cos=cos, sin=sin, **options)
                return jnp.concatenate(parts, axis=1)

            name = f"rope ({module_name}) {case.name}"
            error = partial(_error, np.concatenate(parts, axis=1))
            yield Check(name, run, tuple(arguments.values()), error)


def _bytes_differ(expected: Any, out: Any, *, first: int = 0) -> float:
    """How many bytes of all arrays [N, ...] differ, from block `first` on. NaN equals itself."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True)
    as_bytes = ([np.array(x)[first:].view(np.uint8) for x in pair] for pair in pairs)
    return float(sum((new != want).sum() for new, want in as_bytes))
