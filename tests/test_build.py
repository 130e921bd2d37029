"""The engine put together from a checkpoint: sizing, refusals, and what must survive bad luck."""

import jax
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.build import build
from jaxpage.config import EngineConfig
from jaxpage.weights.spec import variables
from tests import checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2")))


def make_built(path, **options):
    defaults = dict(
        model=path,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enforce_eager=True,
    )
    return build(EngineConfig.from_options(**(defaults | options)))


def make_llm(path, **options):
    return LLM.from_built(make_built(path, **options))


def tokens(llm, prompt=PROMPT, params=GREEDY):
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(path):
    return make_llm(path, num_gpu_blocks_override=20)


def test_too_little_kv_memory_names_the_longest_sequence_that_fits(path):
    with pytest.raises(ValueError, match="largest max_model_len that fits is 112"):
        make_llm(path, kv_cache_memory_bytes=8 * 16 * 4 * 8 * 4 * 2)
    with pytest.raises(ValueError, match="largest max_model_len that fits is 0"):
        make_llm(path, kv_cache_memory_bytes=1, max_model_len="auto")


@pytest.mark.slow
def test_kv_memory_in_bytes_is_taken_as_it_is_and_nothing_is_measured(path, monkeypatch):
    def measured(*args, **options):
        raise AssertionError("compiled or asked for memory, to size a pool of known size")

    for name in ("build.pool_bytes", "composition.size_pool", "composition.measured_step_memory"):
        monkeypatch.setattr(f"jaxpage.{name}", measured)
    built = make_built(path, kv_cache_memory_bytes=20 * 16 * 4 * 8 * 4 * 2)
    assert built.config.num_gpu_blocks_override == 20
    # enforce_eager: a program is compiled at its first use
    assert built.engine.runner.programs.ready == {}
    assert len(tokens(LLM.from_built(built))) == 12


def test_a_head_dim_that_int4_cannot_pack_is_refused_before_the_weights(tmp_path):
    """The folder has none. RoPE turns an even number of dimensions, but it may leave some alone."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.8}
    path = checkpoints.build("phi3", 0, tmp_path, head_dim=15, rope_parameters=rope)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="head_dim of this model is 15, which is odd"):
        make_llm(str(path), kv_cache_dtype="int4")


def test_lmdeploys_share_reaches_the_pool(path, monkeypatch):
    asked = []

    def pool_bytes(devices, *, share_of_free, **rest):
        asked.append(share_of_free)
        return 10**9

    monkeypatch.setattr("jaxpage.build.pool_bytes", pool_bytes)
    make_llm(path, cache_max_entry_count=0.5)
    make_llm(path)
    assert asked == [0.5, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_memory_bytes": "100T"},
            r"pool would take 1099\d\d\.\d\d GB, but cpu has .* GB free",
        ),
        ({"num_gpu_blocks_override": 10**9}, r"pool would take .*num_gpu_blocks_override"),
        ({"swap_space": 4096}, "swap_space=4096 GiB takes 4398.05 GB of RAM"),
    ],
)
def test_sizes_beyond_the_machine_are_refused_before_anything_is_allocated(
    path, options, message, monkeypatch
):
    monkeypatch.setattr("jaxpage.build.Runner", None)  # not even its programs are lowered
    with pytest.raises(ValueError, match=message):
        make_llm(path, **options)


@pytest.mark.slow
def test_auto_takes_the_longest_sequence_that_fits(path):
    llm = make_llm(path, kv_cache_memory_bytes=8 * 16 * 4 * 8 * 4 * 2, max_model_len="auto")
    assert llm.config.max_model_len == 112
    assert len(tokens(llm)) == 12


@pytest.mark.slow
def test_when_memory_is_short_the_largest_step_shrinks(path, monkeypatch):
    asked = []

    def pool_bytes(devices, *, temp_bytes, **shares):
        """Just too little for the first step that is tried."""
        asked.append(temp_bytes)
        return 0 if len(asked) == 1 else asked[1] - temp_bytes

    monkeypatch.setattr("jaxpage.build.pool_bytes", pool_bytes)
    llm = make_llm(path, max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=512)
    assert asked[0] == 0 and asked[1] > asked[2] > 0
    assert llm.config.max_num_batched_tokens < 2048
    assert len(tokens(llm)) == 12


@pytest.mark.slow
def test_eos_ids_that_the_model_does_not_have_are_left_out(path):
    llm = make_llm(path, hf_overrides={"eos_token_id": [2, -1, checkpoints.VOCAB_SIZE + 7]})
    params = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    assert 1 <= len(tokens(llm, params=params)) <= 3


@pytest.mark.slow
def test_numbers_too_large_for_the_device_mean_all_there_is(llm):
    huge = SamplingParams(
        temperature=1e-2, top_k=2**40, ignore_eos=True, max_tokens=None, seed=1, detokenize=False
    )
    assert len(tokens(llm, params=huge)) == 128 - len(PROMPT)


@pytest.mark.slow
def test_replaced_weights_are_used_at_once_and_find_no_stale_cache(path):
    built = make_built(path, num_gpu_blocks_override=20)
    llm = LLM.from_built(built)
    before = tokens(llm)
    for variable in variables(built.model).values():
        variable.set_value(variable.get_value() * 1.25)
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids != before
    llm.reset_prefix_cache()
    assert tokens(llm) == output.outputs[0].token_ids


@pytest.mark.slow
def test_a_step_that_takes_the_pool_with_it_costs_its_requests_only(path):
    # A number of blocks that no other engine of these tests has: the arrays of the pool are told by their shape.
    built = make_built(path, max_num_seqs=1, num_gpu_blocks_override=37)
    llm, runner = LLM.from_built(built), built.engine.runner
    expected = tokens(llm)
    launch = runner.launch

    def failing(plan):
        pool = [x for x in jax.live_arrays() if x.shape == runner.pool_spec.array_shape]
        assert len(pool) == runner.pool_spec.num_arrays
        for array in pool:
            array.delete()
        raise RuntimeError("device lost")

    llm.add_request("doomed", PROMPT[:20], GREEDY)
    llm.add_request("waiting", PROMPT, GREEDY)
    llm.step()
    runner.launch = failing
    with pytest.raises(RuntimeError, match="device lost"):
        llm.step()
    runner.launch = launch
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs["doomed"].outputs[0].finish_reason == "abort"
    assert outputs["waiting"].outputs[0].token_ids == expected
    assert tokens(llm) == expected
