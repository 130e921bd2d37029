"""Steps of models with experts at their real sizes, of two layers, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from tests.aot.compiling import missing, seen
from tests.aot.experts import CASES, FEW, TARGETS, Case, case_of
from tests.aot.models import EXPERTS

__test__ = unsupported_jax() is None
pytestmark = pytest.mark.aot


@pytest.fixture(params=TARGETS)
def found(request) -> list[tuple[Case, dict]]:
    if reason := missing(request.param):
        pytest.skip(reason)
    programs = seen("experts", request.param).programs
    found = [(case_of(request.param, each["name"]), each) for each in programs]
    return sorted(found, key=lambda each: CASES.index(each[0]))


def test_a_decode_step_and_a_prefill_step_of_each_case(found):
    cases = [case for case in CASES if case.target == found[0][0].target]
    assert [case for case, _ in found] == [case for case in cases for _ in range(2)]
    assert all(each["num_layers"] == FEW for _, each in found)


def test_each_device_has_its_experts_and_reads_them_where_they_are(found):
    """Also gpt-oss's [8, 5760, 2880], which XLA on a TPU lays out with the 5,760 outputs in lanes."""
    for case, each in found:
        model = EXPERTS[case.model]
        num_experts = model.get("num_experts") or model["num_local_experts"]
        assert each["experts_of_a_device"] == num_experts // case.num_devices
        assert weight_copies(case, each) == [], each


def test_scales_and_zeros_are_read_where_they_are(found):
    """Also those of `down` in Qwen3-30B-A3B: 6 groups, where a register of a TPU has 8 rows."""
    for _, each in found:
        assert each["scale_copies"] == [], each


def test_experts_of_quantised_checkpoints_take_as_much_memory_as_there(found):
    """128 experts of 3 x 2048 x 768: with 4 bits a scale and a zero for each 128 inputs, with 8 bits a scale."""
    bytes_of_one = {None: 2, "int8": 1, "awq": 0.5 + 5 / 128, "fp8": 1 + 4 / 128}
    for case, each in found:
        if case.model == "Qwen3-30B-A3B":
            expected = FEW * 128 * 3 * 2048 * 768 * bytes_of_one[case.quantization]
            assert each["bytes_of_experts"] == pytest.approx(expected / case.num_devices, rel=0.01)


# As whose dtype XLA has them; integers of 4 bits are bytes, and so is fp8 on its way to VMEM.
STORED = {
    None: ("bf16",),
    "int8": ("s8", "bf16"),
    "awq": ("u8", "s8"),
    "fp8": ("f8e4m3fn", "s8", "bf16"),
}


def weight_copies(case: Case, each: dict) -> list[str]:
    """Arrays as large as a weight of experts, in its dtype, that are no part of it on its way to VMEM."""
    stored = [f"= {dtype}[" for dtype in STORED[case.quantization]]
    lines = each["weight_copies"]
    return [line for line in lines if any(x in line for x in stored) and "slice-start(" not in line]


def test_kernels_serve_attention_and_experts(found):
    """Two products of experts a layer; on an H200 not for 2,880 outputs, which are no multiple of 128. Quantised, those
    of attention are kernels, too, and in int8 the head.
    """
    for case, each in found:
        assert each["attention_calls"] >= FEW, each
        # On a TPU: copy-on-write, and masks and biases of the logits in what samples. Besides, rotary embeddings, if
        # each device has equally many heads, in whole registers.
        others = 0 if case.target == "h200" else 1 + (" decode " in each["name"])
        others += 0 if case.target in ("h200", "v5e:2x4") else FEW
        if case.quantization:  # on one device q, k and v are joined
            others += (2 if case.num_devices == 1 else 4) * FEW
        others += case.quantization == "int8" and " decode " in each["name"]
        # gpt-oss's embedding lies by column on TPUs; of many tokens XLA finds the rows.
        others += (
            case.model == "gpt-oss-20b" and case.target != "h200" and " decode " in each["name"]
        )
        of_experts = each["kernel_calls"] - each["attention_calls"] - others
        is_plain = case.target == "h200" and case.model == "gpt-oss-20b"
        assert of_experts == (0 if is_plain else 2 * FEW), each


def test_pool_and_state_stay_and_temporaries_are_bounded(found):
    for _, each in found:
        assert each["alias_bytes"] >= each["pool_bytes"] + each["state_bytes"], each
        assert each["pool_copies"] == [], each
        assert each["temp_bytes"] < each["most_temp_bytes"], each


def test_devices_exchange_what_those_of_an_mlp_do(found):
    """A sum after the experts of each layer, after each attention and after the embedding. That of gpt-oss's attention
    is float32, since a bias is added to it: a plan does not reckon that.
    """
    for case, each in found:
        if case.num_devices == 1:
            assert each["exchanges"] == []
            continue
        calls = {(kind, size): n for kind, n, size in each["exchanges"]}
        hidden = 2 * each["num_tokens"] * EXPERTS[case.model]["hidden_size"]
        num_float32 = FEW if case.model == "gpt-oss-20b" else 0
        assert calls["all-reduce", hidden] == 2 * FEW + 1 - num_float32, each
        assert calls.get(("all-reduce", 2 * hidden), 0) == num_float32, each
        if " decode " in each["name"]:
            reckoned = sum(n * size * each["num_tokens"] for _, n, size in each["reckoned"])
            sent = sum(n * size for _, n, size in each["exchanges"])
            assert sent == reckoned + num_float32 * hidden, each
        else:
            assert len(calls) == 1 + (num_float32 > 0), each
