"""Every default step program of three models, compiled for TPUs and an H200 on a machine that has neither.

What is proven, and at which depth:
  - here (`-m aot`, in CI): every program of the manifests of v6e:2x2 TP 1 and the H200 once, of one model after
    another, with 2 layers; for each place the smallest and largest decode step and the largest forward of one model
    with all layers (for the others just these, and what has no layers; see `steps.some`);
  - `-m "aot and slow"`: every program of every model, with all layers, everywhere.

That a program compiles says that its kernels keep within VMEM and scalar memory, or shared memory and registers: the
compilers refuse what needs more (`test_tpu_kernels`, `test_gpu_kernels` show it).
"""

from __future__ import annotations

import pytest

from jaxpage.runner.buckets import Bucket
from pallas_kernels.paged_attention.gpu_prompts import FEW_TURNS
from pallas_kernels.paged_attention.tpu import VMEM_BYTES
from tests.aot.compiling import Mode, compile_suite, missing, seen_on
from tests.aot.paged_attention_gpu import SPILLED
from tests.aot.steps import FEW, MODELS, PLACES, TARGETS, Place

pytestmark = pytest.mark.aot

MIB = 2**20
NUM_TOP_LOGPROBS = 20  # as many as a request may ask for, by default
XLA_SPILLS = 8  # bytes a thread, in a scatter


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    return seen_on("steps", TARGETS)[place.name].programs


def test_every_program_of_the_manifest_is_there_once(place, found):
    names = [each["name"] for each in found]
    assert len(set(names)) == len(names)
    whole = [each for each in found if each["num_layers"] != FEW]
    assert {(each["model"], each["num_layers"]) for each in whole} == {
        (place.whole, MODELS[place.whole]["num_hidden_layers"])
    }
    assert sorted(each["bucket"]["decode"] for each in whole) == [False, True, True]
    if place.every:
        # A program that has not changed was seen beside those of its time.
        assert len(names) == max(each["num_programs"] for each in found)
        assert {each["model"] for each in found if each["num_layers"] == FEW} == set(MODELS)
    else:
        assert len(names) == len(whole) + 5  # admit, two of sample, score, vocabulary


def test_pool_and_state_stay_where_they_are(found):
    check_places(found)


def test_temporaries(place, found):
    """`jaxpage plan` compiles the largest of each kind whole, and takes all others for smaller."""
    check_temporaries(place, found)
    of_model = [each for each in found if each["model"] == place.whole]
    planned = max(each["temp_bytes"] for each in of_model if each["num_layers"] != FEW)
    assert planned == max(each["temp_bytes"] for each in of_model)


def test_attention_is_the_kernel_wherever_there_is_one(place, found):
    check_kernels(place, found)


def test_registers_suffice(place, found):
    check_registers(place, found)


def test_devices_exchange_what_tensor_parallelism_needs_and_no_more(place, found):
    check_collectives(place, found)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_all_programs_of_a_model_with_all_layers(place, model):
    found = compile_suite("steps", place.name, Mode.ALL, model).programs
    assert len({each["name"] for each in found}) == found[0]["num_programs"]
    assert {each["num_layers"] for each in found} == {MODELS[model]["num_hidden_layers"]}
    check_places(found)
    check_temporaries(place, found)
    check_kernels(place, found)
    check_registers(place, found)
    check_collectives(place, found)
    buckets = [each["bucket"] for each in found if each["bucket"]]
    largest = {f"sample R={found[0]['max_num_seqs']}"}
    for is_decode in (True, False):
        of_kind = [bucket for bucket in buckets if bucket["decode"] is is_decode]
        largest.add(name_of(max(of_kind, key=lambda bucket: bucket["num_tokens"])))
    planned = max(each["temp_bytes"] for each in found if each["name"] in largest)
    assert planned == max(each["temp_bytes"] for each in found)


def check_places(found: list[dict], *, padding: int = 4 * MIB) -> None:
    """Donated arrays become results, and nothing as large as an array of the pool is made besides.

    padding: bytes that the compiler may add to the request state.
    """
    for each in found:
        stays = {"admit": (0, 1), "set": (0, 1), "sample": (0, 1), "read": (0, 0), "write": (1, 0)}
        stays |= {"score": (0, 0), "vocabulary": (0, 0), "verify": (0, 1), "copy": (0, 1)}
        has_pool, has_state = stays.get(each["name"].split()[0], (1, 1))
        alias_bytes = has_pool * each["pool_bytes"] + has_state * each["state_bytes"]
        # The compiler's tiles are padded: rows of the state to 128 numbers, but nothing of the pool.
        assert alias_bytes <= each["alias_bytes"] <= alias_bytes + has_state * padding, each
        assert each["pool_copies"] == [], each
        assert has_pool == 0 or each["array_bytes"] > 64 * MIB


def check_temporaries(place: Place, found: list[dict]) -> None:
    """No more than some arrays of all logits, where a program samples, and the MLP's of all tokens.

    XLA lets more of them live at once on a GPU; and parts of attention, or what XLA's gathers for it.
    """
    is_gpu = place.target == "h200"
    for each in found:
        model = MODELS[each["model"]]
        logits = num_sampled(each) * model["vocab_size"] * 4
        mlp = num_tokens(each) * model["intermediate_size"] * 2 // place.num_devices
        most = 10 * logits + (10 if is_gpu else 4) * mlp + each["num_layers"] * 2 * MIB
        most += (512 if is_gpu else 64) * MIB
        assert each["temp_bytes"] < most, (each, most)


def check_kernels(place: Place, found: list[dict]) -> None:
    """On TPUs one for each layer and in steps with prompts another for rows with one query, with the VMEM that they ask
    for. On a GPU two for each layer, and with prompts three more, and two for each further turn of cut rows.
    """
    for each in found:
        calls = each["attention_calls"]
        if not each["bucket"]:
            assert calls == [], each
        elif place.target != "h200":
            of_layer = 1 if each["bucket"]["decode"] else 2
            assert calls == [VMEM_BYTES] * each["num_layers"] * of_layer, each
        else:
            of_layer = (
                {2} if each["bucket"]["decode"] else {5 + 2 * more for more in range(FEW_TURNS)}
            )
            assert len(calls) / each["num_layers"] in of_layer, each


def check_registers(place: Place, found: list[dict]) -> None:
    """No kernel of a GPU puts registers into memory, but for what attention of prompts may (see `test_gpu_kernels`) and
    for a number or three in small ones of XLA's. One that two programs share is told once.
    """
    spilled = [kernel for each in found for kernel in each["spilled"].items()]
    assert (len(spilled) > 100) is (place.target == "h200")
    for name, num_bytes in spilled:
        most = XLA_SPILLS
        if name.startswith("paged_"):
            most = SPILLED["mixed" if name.startswith("paged_prefill") else "decode"]
        assert num_bytes <= most, (name, num_bytes)
    ours = {name.partition("_mosaic")[0] for name, _ in spilled if name.startswith("paged_")}
    kinds = {"paged_decode", "paged_combine", "paged_prefill"}
    assert ours == (kinds if place.target == "h200" else set())


def check_collectives(place: Place, found: list[dict]) -> None:
    """A sum after each MLP, the embedding and, if its weights are divided, each attention; once a device's share of the
    logits, of all columns for its own rows; then what was sampled, in two calls of each of two kinds. All logits where
    all are wanted.

    Sizes are those of the largest: hidden states of all tokens, logits, top logprobs. Rows are padded to a multiple of
    the devices.
    """
    for each in found:
        model = MODELS[each["model"]]
        expected = {}
        rows = -(-num_sampled(each) // place.num_devices) * place.num_devices
        if place.num_devices > 1 and each["bucket"]:
            has_own_heads = model["num_attention_heads"] % place.num_devices == 0
            number = (1 + has_own_heads) * each["num_layers"] + 1
            expected["all-reduce"] = (number, 2 * num_tokens(each) * model["hidden_size"])
        if place.num_devices > 1 and each["name"] in ("score", "vocabulary"):
            expected["all-gather"] = (1, 4 * rows * model["vocab_size"])
        elif place.num_devices > 1 and rows:
            expected["all-to-all"] = (1, 4 * rows * model["vocab_size"] // place.num_devices)
            expected["all-gather"] = (2, 4 * rows * NUM_TOP_LOGPROBS)
            number, num_bytes = expected.get("all-reduce", (0, 8 * rows))
            expected["all-reduce"] = (number + 2, num_bytes)
        assert by_kind(each["exchanges"]) == expected, each


def by_kind(exchanges: list) -> dict[str, tuple[int, int]]:
    """Of each kind how many there are, and the bytes of the largest."""
    found: dict[str, tuple[int, int]] = {}
    for kind, count, num_bytes in exchanges:
        number, largest = found.get(kind, (0, 0))
        found[kind] = number + count, max(num_bytes, largest)
    return found


def name_of(bucket: dict) -> str:
    return Bucket(**bucket).name


def num_tokens(each: dict) -> int:
    """That go through the layers."""
    return each["bucket"]["num_tokens"] if each["bucket"] else 0


def num_sampled(each: dict) -> int:
    """Rows that a program samples a token for, or scores tokens of."""
    kind, _, size = each["name"].partition("=")
    if kind in ("score", "vocabulary"):
        return {"score": 64, "vocabulary": 8}[kind]
    return int(size) if kind in ("decode R", "sample R", "verify R", "draft R") else 0
