"""What `jaxpage plan` makes of sizes: arithmetic that one can redo on paper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpage.aot.estimate import decode_step, estimate, kv_bytes
from jaxpage.aot.plan import show, show_table
from jaxpage.aot.targets import CHIPS, parse_target
from pallas_kernels.paged_attention.tpu_layout import unsupported_reason

GB = 10**9


def measured(**changes):
    """A chip of 10 GB at 1 TB/s; 4 GB of weights; blocks of 1 MB and 100 tokens."""
    chip = {
        "num_bytes": 10 * GB,
        "bytes_per_second": 1e12,
        "flops_per_second": 1e14,
        "device_kind": "Some chip",
    }
    config = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "quantization": None,
        "max_model_len": 100_000,
        "block_size": 100,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.9,
    }
    program = {"name": "decode R=64", "seconds": 1.0, "exchanges": [["all-reduce", 5, 2**20]]}
    links = {"bytes_per_second": 1e9, "steps": 1, "seconds_per_step": 1e-3, "seconds_per_call": 0.0}
    found = {
        "target": "chip:2x2",
        "attention": "kernel",
        "num_devices": 1,
        "target_devices": 4,
        "config": config | changes.pop("config", {}),
        "chip": chip,
        "links": links,
        "exchange": [],
        "weight_bytes": 4 * GB,
        "bytes_per_step": 3 * GB,
        "flops_per_token": 3 * GB,
        "experts": None,
        "encoder": None,
        "drafts": None,
        "recurrence": None,
        "state_bytes": GB // 10,
        "block_bytes": 10**6,
        "kv_groups": [[None, 28]],
        "in_int8": {"weight_bytes": 2 * GB, "block_bytes": 10**6 // 2},
        "temp_bytes": GB + GB // 10,
        "blocks": {"1000": [10, 10], "100000": [1000, 1000]},
        "smaller_steps": [],
        "longest": [[50_000, 500], [25_000, 250], [100, 1]],
        "programs": [
            program | {"temp_bytes": GB, "result_bytes": 0},
            program | {"temp_bytes": 5, "result_bytes": GB // 20},
        ],
    } | changes
    # As sizing counts them: what 90 % of the chip leaves beside weights, state and temporaries.
    left = 9 * GB - found["weight_bytes"] - found["state_bytes"] - found["temp_bytes"]
    most_layers = max(num_layers for _, num_layers in found["kv_groups"])
    of_layer = found["block_bytes"] / most_layers
    of_blocks = {"num_blocks": int(left) // found["block_bytes"], "layer_block_bytes": of_layer}
    return of_blocks | found


def test_a_model_that_fits():
    estimated = estimate(measured())
    # 9 GB usable - 4 weights - .1 state - 1.1 temporaries and results
    assert (estimated.temp_bytes, estimated.pool_bytes) == (1.1 * GB, 3.8 * GB)
    assert estimated.num_blocks == 3799 and estimated.num_tokens == 100_000 and estimated.fits
    assert estimated.batches == {1000: 64, 100_000: 3} and estimated.changes == ()


def test_the_fastest_step_reads_weights_and_kv_once_or_multiplies_all_rows():
    estimated = estimate(measured())
    assert estimated.decode[1, 1000].total == pytest.approx(3 + 0.01)
    assert estimated.decode[3, 100_000].total == pytest.approx(3 + 3.0)
    slow = measured(flops_per_token=10**12)
    assert estimate(slow).decode[64, 1000].total == pytest.approx(64 * 10)


def test_of_experts_those_of_the_batch_are_read():
    """2 GB of 8 experts, of which a token has 2: 0.5 GB for one token, 0.875 for two, as good as all for 64."""
    experts = {"num_experts": 8, "experts_per_token": 2, "weight_bytes": 2 * GB}
    found = measured(experts=experts | {"num_parameters": 4 * 10**9, "num_active": 25 * 10**8})
    assert decode_step(found, 1, 1000).weights == pytest.approx(1 + 0.5)
    assert decode_step(found, 2, 1000).weights == pytest.approx(1 + 0.875)
    assert decode_step(found, 64, 1000).weights == pytest.approx(3, abs=1e-6)
    line = "4.0 G parameters, of which a token uses 2.5 G: 2 of 8 experts a layer"
    assert line in show(found, estimate(found)).splitlines()
    assert "experts a layer" not in show(measured(), estimate(measured()))


def test_then_devices_exchange():
    """5 sums of a KB a row: of two rows and two devices each sends 2 KB, twice in a step of a ms."""
    step = decode_step(measured(num_devices=2, exchange=[["all-reduce", 5, 1000]]), 2, 1000)
    assert step.exchange == pytest.approx(5 * (2 + 2e-3))
    assert step.total == pytest.approx(3 + 2 * 0.01 + step.exchange)


def test_what_does_not_fit_says_what_would():
    estimated = estimate(measured(weight_bytes=7.5 * GB))  # .3 GB are left, 1 GB is wanted
    assert not estimated.fits and estimated.num_blocks == 299 and estimated.num_tokens == 25_000
    assert estimated.changes == ("--max-model-len 25000", "--quantization int8", "--tp 2")
    kv = estimate(measured(blocks={"100000": [5000, 5000]}, longest=[]))
    assert kv.changes == ("--kv-cache-dtype int8", "--quantization int8", "--tp 2")
    alone = estimate(measured(weight_bytes=7.5 * GB, target_devices=1))
    assert alone.changes[-1] == "--tp 2 on a target with as many devices"
    hopeless = estimate(
        measured(weight_bytes=100 * GB, in_int8={"weight_bytes": 50 * GB, "block_bytes": 10**6})
    )
    assert hopeless.num_blocks == 0 and "larger chip" in hopeless.changes[0]
    already = {"weight_bytes": None, "block_bytes": None}
    smaller = measured(weight_bytes=7.5 * GB, in_int8=already)
    assert estimate(smaller).changes == ("--max-model-len 25000", "--tp 2")


def test_smaller_steps_may_leave_room():
    """0.3 GB are left, 1 GB is wanted; of 1.1 GB of temporaries 0.7 GB must go."""
    steps = [(128, 700_000_000, 1000), (64, 390_000_000, 1000)]
    found = measured(weight_bytes=7.5 * GB, smaller_steps=steps)
    assert estimate(found).changes[:2] == ("--max-model-len 25000", "--max-num-batched-tokens 64")
    # With a window a sequence needs fewer blocks if a step has fewer tokens.
    windowed = [(128, 700_000_000, 600), *steps[1:]]
    found = measured(weight_bytes=7.5 * GB, smaller_steps=windowed, longest=[])
    assert estimate(found).changes[0] == "--max-num-batched-tokens 128"
    found = measured(weight_bytes=7.5 * GB, smaller_steps=steps[:1])
    assert not any("batched" in each for each in estimate(found).changes)


def test_a_step_that_only_the_kernel_makes_fit_names_the_block_sizes():
    """XLA's copies of the pool took all memory: neither a shorter length nor int8 would help."""
    q, pool = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4, 128), (99, 7, 256)))
    reason = unsupported_reason(q, pool, 1, (4, 4))
    large = {"temp_bytes": 10 * GB, "num_blocks": 2000}
    estimated = estimate(measured(attention=f"plain XLA: {reason}", **large))
    assert not estimated.fits and estimated.pool_bytes == 0
    assert estimated.num_blocks == estimated.num_tokens == 0
    assert set(estimated.batches.values()) == {0}
    assert estimated.changes == (
        "the attention kernel instead of plain XLA: set --block-size to a power of two, at least 16",
    )
    assert "larger chip" in estimate(measured(**large)).changes[0]
    other = unsupported_reason(q, pool, 2, (4, 4))
    assert "block_size" in other
    estimated = estimate(measured(attention=f"plain XLA: {other}", **large))
    assert "larger chip" in estimated.changes[0]


def test_everything_is_shown():
    facts = measured()
    text = show(facts, estimate(facts))
    for word in (
        "Some chip",
        "3.54",
        "3799 of 1000000",
        "64 of 1000",
        "5 all-reduce of 1.00 MiB",
        "It fits: 3",
    ):
        assert word in text
    assert "of that devices exchange" not in text
    shared = measured(num_devices=2, exchange=[["all-reduce", 5, 1000]])
    assert "of which exchange takes 10.01 ms at 1 x 1000" in show(shared, estimate(shared))
    short = measured(weight_bytes=7.5 * GB)
    assert "It does not fit" in show(short, estimate(short))
    table = show_table([facts, short], [estimate(facts), estimate(short)]).splitlines()
    assert len(table) == 3 and " yes" in table[1] and "--tp 2" in table[2]


@pytest.mark.parametrize(
    ("text", "num_devices"),
    [("v6e:2x2", 4), ("V5E:2x4", 8), ("tpu7x:2x2x1", 8), ("h200", 1), ("h200:8", 8)],
)
def test_targets_are_chips_and_topologies(text, num_devices):
    target = parse_target(text)
    assert target.num_devices == num_devices and target.name == text.lower()


@pytest.mark.parametrize("text", ["v9:2x2", "v6e", "v6e:2", "v6e:2x2x1", "v6e:axb", "h200:2x4"])
def test_other_targets_are_refused(text):
    with pytest.raises(ValueError, match="no chip|like"):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        *(
            (f"v6e:{size}", "v6e slices are 1x1, 2x2, 2x4, .*16x16$")
            for size in ("3x5", "64x64", "0x2")
        ),
        ("v5p:3x3x3", "v5p slices are 2x2x1, .*, and multiples of four up to 6,144 chips$"),
        ("tpu7x:64x64x4", "tpu7x slices are 1x1x1, .*, and multiples of four up to 9,216 chips$"),
        ("v5p:1x1x1", "v5p slices are 2x2x1, "),
        ("h200:16", "a host has 1 to 8$"),
    ],
)
def test_topologies_that_do_not_exist_are_refused(text, others):
    with pytest.raises(ValueError, match=f"there is no {text}; {others}"):
        parse_target(text)
    assert parse_target("v5p:4x4x8").num_chips == 128
    assert parse_target("v5p:16x16x24").num_chips == 6144


def test_every_chip_has_plausible_numbers():
    for chip in CHIPS.values():
        # What a step reads in the time of a product's multiplications: between 100 and 1000 flops a byte.
        assert 100 < chip.flops_per_second / chip.bytes_per_second < 1000
        assert 15 * 2**30 < chip.num_bytes < 200 * 2**30


def test_the_encoder_of_pictures_is_named():
    encoder = {"num_parameters": 10**9, "weight_bytes": 2**31, "largest": 65_536}
    found = measured(encoder=encoder)
    text = "2.00 GiB of the weights, 1.00 G parameters, encode pictures; the largest picture has 65536 patches"
    assert text in show(found, estimate(found)).splitlines()
    assert "encode pictures" not in show(measured(), estimate(measured()))


def test_only_one_sequence_at_a_time_holds_the_blocks_of_a_prompt():
    """With a window the others hold fewer: of 1,000 blocks one has 400, and four have 150 each."""
    blocks = {"1000": [400, 150], "100000": [1000, 400]}
    found = estimate(measured(num_blocks=1001, blocks=blocks))
    assert found.batches == {1000: 5, 100_000: 1}
    assert estimate(measured(num_blocks=400, blocks=blocks)).batches == {1000: 0, 100_000: 0}


def test_a_window_limits_the_keys_that_are_read():
    """Of two KV-cache groups one sees 250 tokens: 3 blocks of 100, while the other reads all 10."""
    both = measured(kv_groups=[[None, 14], [250, 14]])
    assert kv_bytes(both, 100, 1, 1000) == 13 * 10**6
    assert kv_bytes(both, 100, 4, 200) == 4 * 4 * 10**6
    fewer = measured(kv_groups=[[None, 14], [250, 7]])
    assert kv_bytes(fewer, 100, 2, 1000) == (2 * 10 + 3) * 10**6
    assert decode_step(both, 2, 1000).kv == pytest.approx(26 * 10**6 / 1e9)


OF_STATES = {
    "sequence_bytes": 50 * 10**6,
    "num_cached": 10,
    "flops_per_token": 10**9,
    "flops_in_prompts": 2 * 10**9,
}


def test_a_step_reads_and_writes_the_states_of_its_rows():
    """50 MB a row at 1 TB/s, both ways; a GFLOP a row beside the three of the parameters."""
    found, plain = measured(recurrence=OF_STATES), measured()
    step = decode_step(found, 4, 1000)
    assert step.state == pytest.approx(4 * 0.1)
    assert step.total == pytest.approx(decode_step(plain, 4, 1000).total + 0.4)
    assert step.products == pytest.approx(4 / 3 * decode_step(plain, 4, 1000).products)
    line = "50.0 MB of recurrent state a sequence, 2.98 GiB of the request state for 64 and 0.47 for 10 in the prefix"
    assert line in show(found, estimate(found)) and "recurrent" not in show(plain, estimate(plain))


def test_fewer_states_may_leave_room_for_keys_and_values():
    """Of 64 states 32 free 1.6 GB, and 10 of the prefix cache 0.5, where 0.7 GB are missing."""
    found = measured(weight_bytes=7.5 * GB, recurrence=OF_STATES)
    assert "--max-num-seqs 32" in estimate(found).changes
    assert "--no-enable-prefix-caching" not in estimate(found).changes
    more = found | {"recurrence": OF_STATES | {"num_cached": 20}}
    assert "--no-enable-prefix-caching" in estimate(more).changes
    for other in (
        measured(weight_bytes=7.5 * GB),
        found | {"recurrence": OF_STATES | {"sequence_bytes": 10}},
    ):
        assert not any("--max-num-seqs" in each for each in estimate(other).changes)


# A pass through a draft model: 0.5 GB, of which 0.1 are its head.
OF_DRAFTS = {
    "weight_bytes": GB // 2,
    "bytes_per_step": GB // 2,
    "flops_per_token": GB // 2,
    "head_bytes": GB // 10,
    "head_flops": GB // 10,
    "exchange": [],
    "experts": None,
    "recurrence": None,
    "kv_groups": [[None, 10]],
    "layer_block_bytes": 10**4,
    "block_bytes": 10**5,
    "num_parameters": GB // 4,
    "kind": "a model",
    "attention": None,
}
LOOKUP = {"num_tokens": 4, "forward": "forward T=512", "model": None}


def test_a_step_with_drafts_multiplies_all_of_them_and_reads_the_weights_once():
    found = measured(drafts=LOOKUP)
    step = decode_step(found, 2, 1000)
    plain = decode_step(measured(), 2, 1000)
    assert (step.weights, step.kv, step.drafts) == (plain.weights, plain.kv, 0)
    assert step.products == pytest.approx(5 * plain.products)
    # 64 rows would have 320 tokens, and a step has 256.
    assert decode_step(found, 64, 1000).products == pytest.approx(4 * 64 * 3e9 / 1e14 * 1000)


def test_a_draft_model_reads_its_weights_and_keys_for_each_draft_and_once_more():
    found = measured(drafts=LOOKUP | {"model": OF_DRAFTS})
    step = decode_step(found, 2, 1000)
    # ms: four drafts, of 0.5 GB and 2 x 10 blocks of 0.1 MB; then the step's own tokens, without logits.
    assert step.drafts == pytest.approx(4 * (0.5 + 0.002) + 0.4 + 0.002)
    assert step.total == pytest.approx(step.weights + step.kv + step.drafts)
    slow = OF_DRAFTS | {"flops_per_token": 10**12, "head_flops": 2 * 10**11}
    step = decode_step(measured(drafts=LOOKUP | {"model": slow}), 2, 1000)
    assert step.drafts == pytest.approx(4 * 2 * 10 + 2 * 5 * 8)
    # The rows use up the step's tokens: no drafts, but the draft model computes what the model computes.
    full = measured(drafts=LOOKUP | {"model": OF_DRAFTS}, config={"max_num_batched_tokens": 2})
    step, plain = decode_step(full, 2, 1000), decode_step(measured(), 2, 1000)
    assert step.drafts == pytest.approx(0.4 + 0.002)
    assert step.total == pytest.approx(plain.total + step.drafts)


def test_a_draft_model_exchanges_too():
    shared = {"num_devices": 2, "exchange": [["all-reduce", 5, 1000], ["all-to-all", 1, 4000]]}
    model = OF_DRAFTS | {"exchange": shared["exchange"]}
    (with_model, lookup, plain), batch = (
        [measured(drafts=drafts, **shared) for drafts in (LOOKUP | {"model": model}, LOOKUP, None)],
        2,
    )
    once = decode_step(plain, batch, 1000).exchange
    checked = decode_step(lookup, batch, 1000).exchange
    of_logits = decode_step(plain | {"exchange": shared["exchange"][1:]}, 10, 1000).exchange
    found = decode_step(with_model, batch, 1000)
    assert found.exchange == pytest.approx(checked + 4 * once + checked - of_logits)


def test_what_does_not_fit_may_fit_without_a_draft_model():
    large = LOOKUP | {"model": OF_DRAFTS | {"weight_bytes": GB}}
    found = measured(weight_bytes=7.5 * GB, longest=[], drafts=large)
    assert estimate(found).changes == ("--quantization int8", "no draft model", "--tp 2")
    small = LOOKUP | {"model": OF_DRAFTS | {"weight_bytes": GB // 10}}
    found = measured(weight_bytes=7.5 * GB, longest=[], drafts=small)
    assert "no draft model" not in estimate(found).changes


def test_what_drafts_cost_is_shown():
    found = measured(drafts=LOOKUP | {"model": OF_DRAFTS})
    text = show(found, estimate(found))
    assert "drafts: at most 4 of a row, by a model of 0.25 G parameters: 0.47 GiB" in text
    assert "10% of a KV block" in text and "of which the draft model takes 2.4" in text
    step, plain = (decode_step(each, 1, 1000).total for each in (found, measured()))
    gain = f"a row 1 to 5 tokens; drafts pay if these are more than {step / plain:.2f} at 1 x 1000"
    assert gain in text and f"({plain:.2f} ms without drafts)" in text
    head = measured(drafts=LOOKUP | {"model": OF_DRAFTS | {"kind": "an EAGLE head"}})
    assert "by an EAGLE head of 0.25 G parameters" in show(head, estimate(head))
    lookup = measured(drafts=LOOKUP)
    text = show(lookup, estimate(lookup))
    assert "drafts: at most 4 of a row, by prompt lookup" in text and "draft model" not in text
    assert "draft" not in show(measured(), estimate(measured()))
