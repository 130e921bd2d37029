"""What is promised of the compiled programs: few, in place, with small temporaries, and never one more."""

import random
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, SamplingParams
from jaxpage.aot.hlo import parse
from jaxpage.kv_groups import Location
from tests import checkpoints
from tests.few_programs import few_programs

TEMP_BOUND = 8 << 20  # bytes, for 8 rows and 64 tokens; far below the pool


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.build("qwen3", 0, tmp_path_factory.mktemp("qwen3"))


def make_llm(path, **options):
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        **options,
    )
    llm.wait_until_warm()
    return llm


@pytest.fixture(
    scope="module",
    params=[
        "two step sizes",
        pytest.param("all step sizes", marks=pytest.mark.slow),
        pytest.param("two, as users compile", marks=pytest.mark.slow),
    ],
)
def llm(request, path, as_users_compile):
    """Of the largest step sizes or all, compiled quickly, or of the largest ones, compiled as for users: each such
    program takes five times as long, and those of other sizes consist of the same operations.
    """
    few = nullcontext() if request.param == "all step sizes" else few_programs()
    as_users = as_users_compile() if "users" in request.param else nullcontext()
    with few, as_users:
        return make_llm(path, num_gpu_blocks_override=40_000)


@pytest.fixture(scope="module")
def runner(llm):
    return llm._engine.runner


READING = ("score", "vocabulary")  # programs that change nothing
WITHOUT_POOL = ("admit", "sample", "set ", *READING)


def runner_of(path, **options):
    """Of an engine with two step sizes, whose programs with the pool are compiled: no other depends on what it is."""
    with few_programs():
        runner = make_llm(path, enforce_eager=True, **options)._engine.runner
    names = [name for name in runner.programs.names if not name.startswith(WITHOUT_POOL)]
    assert len(names) >= 2
    for name in names:
        assert runner.programs[name] is not None  # compiles it
    return runner


def assert_in_place(runner, temp_bound):
    pool = runner.pool_spec.num_bytes
    state = sum(array.nbytes for array in jax.tree.leaves(runner._state))
    for program in runner.programs.ready.values():
        without_pool = program.name.startswith(WITHOUT_POOL)
        without_state = program.name.startswith(READING)
        owned = (0 if without_state else state) + (0 if without_pool else pool)
        assert program.alias_bytes >= owned, program.name
        assert program.temp_bytes < temp_bound, program.name


def test_every_program_updates_pool_and_state_in_place(runner):
    assert runner.pool_spec.num_bytes > 10 * TEMP_BOUND
    assert_in_place(runner, TEMP_BOUND)


def assert_no_copies(runner):
    """Of any array of the pool, in the text of any program."""
    arrays = jax.tree.leaves(runner.pool_spec.abstract())
    shapes = {array.shape for array in arrays}
    for program in runner.programs.ready.values():
        for each in parse(program.compiled.as_text()):
            copied = each.opcode == "copy" and shapes.intersection(a.shape for a in each.arrays)
            assert not copied, f"{program.name}: {each.line}"


def test_no_step_copies_the_pool(runner):
    assert_no_copies(runner)


@pytest.mark.slow
def test_layers_of_several_groups_share_the_arrays_of_the_pool_in_place(tmp_path, as_users_compile):
    path = checkpoints.build("gemma3", 0, tmp_path)  # two layers with a window, one without
    with as_users_compile():
        runner = runner_of(path, num_gpu_blocks_override=60_000)
    assert (
        runner.groups.layer_locations == tuple(Location(group, 0) for group in range(3))
        and runner.pool_spec.num_arrays == 1
    )
    assert runner.pool_spec.num_bytes > 5 * TEMP_BOUND
    assert_in_place(runner, TEMP_BOUND)
    assert_no_copies(runner)


@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("int8", "int4", "fp8_e4m3")),
        pytest.param("fp8_e5m2", marks=pytest.mark.deep),
    ],
)
def test_every_program_updates_a_quantised_pool_in_place(kv_cache_dtype, path, as_users_compile):
    """int4 as users have it: XLA fuses most around it."""
    compiler = as_users_compile() if kv_cache_dtype == "int4" else nullcontext()
    with compiler:
        runner = runner_of(path, kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=60_000)
    assert runner.pool_spec.num_bytes > 10 * TEMP_BOUND
    assert_in_place(runner, TEMP_BOUND)
    assert_no_copies(runner)


def test_every_program_is_compiled_and_has_its_line_in_the_manifest(runner):
    lines = runner.programs.manifest().splitlines()
    names = {line[:20].strip() for line in lines[1:-1]}
    assert names == set(runner.programs.names)
    assert lines[-1].startswith(f"{len(names)} programs in ")


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_in_depth(llm):
    check_nothing_compiles(llm, 100)


def test_nothing_compiles_after_warm_up(llm):
    check_nothing_compiles(llm, 30)


def check_nothing_compiles(llm, num_requests):
    """With requests of all kinds and lengths."""
    rng = random.Random(1)
    vocab = checkpoints.VOCAB_SIZE
    prompts = [
        [rng.randrange(3, vocab) for _ in range(rng.choice((1, 3, 20, 100, 300)))]
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.7)),
            top_p=rng.choice((1.0, 0.9)),
            n=1,
            seed=rng.choice((None, 3)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, 0, 5)),
            allowed_token_ids=rng.choice((None, list(range(10, 90)))),
            max_tokens=rng.randrange(1, 30),
            detokenize=False,
        )
        for _ in range(num_requests)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.finished for output in outputs)
    assert llm.stats().num_recompiles == 0


@pytest.mark.slow
def test_the_default_configuration_has_at_most_25_programs(tmp_path):
    path = checkpoints.build("llama", 0, tmp_path)
    default = LLM(str(path), skip_tokenizer_init=True, enforce_eager=True)  # compiles none of them
    assert len(default.programs()) <= 25
    assert default.stats().num_recompiles == 0
    assert_in_place(default._engine.runner, 32 << 20)  # 256 rows, 2048 tokens


@pytest.mark.slow
def test_weights_of_nan_are_told_once_and_counted(tmp_path, caplog):
    path = checkpoints.build("qwen2", 0, tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})
    llm = checkpoints.make_llm(path, enforce_eager=True)
    for _ in range(2):
        llm.generate([[3, 4]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert llm.stats().num_nan_steps == llm.stats().num_steps > 1
    said = [record for record in caplog.records if "computes NaN" in record.message]
    assert len(said) == 1 and said[0].levelname == "WARNING"
