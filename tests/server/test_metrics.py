"""What is counted, from steps and outputs made by hand; and that it is what requests of a real engine had."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxpage.request import FinishReason
from jaxpage.runner.programs import ProgramRecord
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.server.histogram import Histogram, one_two_five
from jaxpage.server.metrics import Metrics
from tests.server.stubs import NO_STATS, Scrape, StubLLM, make_output, make_request, make_step, now


def make_metrics(**options):
    llm = StubLLM(**options)
    return llm, Metrics(llm, "demo")


def scrape(metrics: Metrics) -> Scrape:
    return Scrape(metrics.render())


VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "iteration_tokens_total",
)
VLLM_COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "generation_tokens",
    "request_success",
    "admission_rejections",
)
VLLM_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cache_config_info",
)


def test_names_types_and_labels_are_vllms():
    _, metrics = make_metrics()
    metrics.rejected()
    found = scrape(metrics)
    types = {name: family.type for name, family in found.families.items()}
    expected = dict.fromkeys(VLLM_HISTOGRAMS, "histogram")
    expected |= dict.fromkeys(VLLM_COUNTERS, "counter") | dict.fromkeys(VLLM_GAUGES, "gauge")
    vllms = {name: kind for name, kind in types.items() if name.startswith("vllm:")}
    vllms.pop("vllm:admission_rejections_created", None)
    assert vllms == {f"vllm:{name}": kind for name, kind in expected.items()}
    for sample in found.samples:
        if not sample.name.startswith("http_"):
            assert sample.labels["model_name"] == "demo" and sample.labels["engine"] == "0"


def test_accepted_tokens_are_counted_by_position():
    llm, metrics = make_metrics(num_drafts=3)
    llm.tell(accepted_per_position=(5, 2))
    found, name = scrape(metrics), "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[name, f"position={i}"] for i in range(3)] == [5, 2, 0]


def test_buckets_are_vllms():
    _, metrics = make_metrics(max_model_len=300)
    found = scrape(metrics)
    bounds = found.label_values("vllm:time_to_first_token_seconds_bucket", "le")
    assert bounds[:3] == ["0.001", "0.005", "0.01"] and bounds[-2:] == ["2560.0", "+Inf"]
    bounds = found.label_values("vllm:inter_token_latency_seconds_bucket", "le")
    assert len(bounds) == 20 and bounds[-2:] == ["80.0", "+Inf"]
    bounds = found.label_values("vllm:e2e_request_latency_seconds_bucket", "le")
    assert bounds[0] == "0.3" and bounds[-2:] == ["7680.0", "+Inf"]
    bounds = found.label_values("vllm:request_prompt_tokens_bucket", "le")
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    bounds = found.label_values("vllm:iteration_tokens_total_bucket", "le")
    assert bounds[:3] == ["1.0", "8.0", "16.0"] and bounds[-2:] == ["16384.0", "+Inf"]


def test_a_value_on_a_bound_belongs_to_the_bucket_that_ends_there():
    histogram = Histogram((1, 2))
    histogram.observe(1)
    histogram.observe(1.5, count=3)
    histogram.observe(9)
    assert histogram.read() == ([("1.0", 1), ("2.0", 4), ("+Inf", 5)], 14.5)
    assert one_two_five(1) == (1,) and one_two_five(49) == (1, 2, 5, 10, 20)


def test_the_first_token_is_told_from_those_that_follow():
    _, metrics = make_metrics()
    request = make_request(queued=10.0)
    metrics.added(request)
    for time, count in ((10.5, 1), (10.75, 4), (11.25, 4)):
        metrics.took_step(make_step(time, {("r#0", 0): count}))
    found = scrape(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_sum"] == 0.75
    assert found["vllm:time_per_output_token_seconds_sum"] == 0.75
    assert found["vllm:inter_token_latency_seconds_bucket", "le=0.3"] == 1


def test_a_request_of_n_sequences_has_one_first_token_and_a_gap_for_each_sequence():
    _, metrics = make_metrics()
    metrics.added(make_request(n=3))
    metrics.took_step(make_step(11.0, {("r#0", 0): 1, ("r#0", 1): 1}))
    metrics.took_step(make_step(12.0, {("r#0", 0): 1, ("r#0", 1): 1, ("r#0", 2): 1}))
    metrics.took_step(make_step(14.0, {("r#0", 2): 1}))
    found = scrape(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == 4.0


def test_entries_without_tokens_and_of_unknown_requests_are_no_tokens():
    _, metrics = make_metrics()
    metrics.added(make_request())
    metrics.took_step(make_step(11.0, {("r#0", 0): 0, ("ended#1", 0): 1}))
    assert scrape(metrics)["vllm:time_to_first_token_seconds_count"] == 0


def test_a_finished_request():
    _, metrics = make_metrics()
    request = make_request(prompt_len=5, n=2, max_tokens=40, queued=now() - 9.0)
    metrics.added(request)
    output = make_output(request, (3, 5), reason="length", num_cached=4, num_preemptions=3)
    metrics.finished(request, output)
    found = scrape(metrics)
    sums = {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 3.0,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 5,
        "request_generation_tokens": 8,
        "request_max_num_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 1,
        "request_params_n": 2,
        "request_params_max_tokens": 40,
        "request_num_preemptions": 3,
    }
    for name, value in sums.items():
        assert found[f"vllm:{name}_count"] == 1, name
        assert found[f"vllm:{name}_sum"] == pytest.approx(value), name
    assert 9.0 <= found["vllm:e2e_request_latency_seconds_sum"] < 19.0
    ended = {r: found["vllm:request_success_total", f"finished_reason={r}"] for r in FinishReason}
    assert ended == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}


def test_a_request_that_was_never_scheduled_has_no_time_in_any_phase():
    _, metrics = make_metrics()
    request = make_request(queued=now())
    metrics.finished(request, make_output(request, (0,), reason="abort", seconds=None))
    found = scrape(metrics)
    for phase in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{phase}_time_seconds_count"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert found["vllm:request_success_total", "finished_reason=abort"] == 1


def test_requests_without_a_last_output_are_counted_and_forgotten():
    _, metrics = make_metrics()
    for number in range(2):
        metrics.added(make_request(f"r#{number}"))
    metrics.dropped(make_request("r#0"), None)
    metrics.dropped(make_request("r#1"), RuntimeError("the step failed"))
    # Steps that were under way still bring tokens of it.
    for time in (11.0, 12.0):
        metrics.took_step(make_step(time, {("r#0", 0): 1}))
    found = scrape(metrics)
    assert found["vllm:request_success_total", "finished_reason=abort"] == 1
    assert found["vllm:request_success_total", "finished_reason=error"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 0


def test_the_engines_numbers_are_read_when_scraped():
    llm, metrics = make_metrics()
    llm.tell(num_running=3, num_waiting=2, kv_cache_usage=0.25, num_blocks=40)
    llm.tell(prompt_tokens=100, prefix_cache_queries=90, prefix_cache_hits=30)
    llm.tell(num_recompiles=1, num_nan_steps=2, num_unused_slots=8, num_allocated_slots=32)
    found = scrape(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:num_requests_waiting_by_reason", "reason=capacity"] == 2
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["vllm:prompt_tokens_total"] == 100
    assert found["vllm:prompt_tokens_cached_total"] == found["vllm:prefix_cache_hits_total"] == 30
    assert found["vllm:prompt_tokens_by_source_total", "source=local_compute"] == 70
    assert found["vllm:prompt_tokens_by_source_total", "source=local_cache_hit"] == 30
    info = ("block_size=16", "num_gpu_blocks=40", "kv_cache_size_tokens=640")
    assert found["vllm:cache_config_info", *info] == 1
    assert found["jaxpage:recompiles_total"] == 1 and found["jaxpage:nan_steps_total"] == 2
    assert found["jaxpage:kv_cache_waste"] == 0.25
    llm.tell(num_running=1)
    assert scrape(metrics)["vllm:num_requests_running"] == 1


def test_each_replica_has_its_number():
    llm, metrics = make_metrics()
    parts = (
        replace(NO_STATS, num_running=3, generation_tokens=10, prompt_tokens=5),
        replace(NO_STATS, generation_tokens=7, num_failed_replicas=1),
    )
    llm.tell(num_running=3, generation_tokens=17, num_failed_replicas=1, replicas=parts)
    llm.records = [
        ProgramRecord(name="admit", origin="stored", seconds=0.5),
        ProgramRecord(name="admit", origin="compiled", seconds=2.0, replica=1),
    ]
    found = scrape(metrics)
    for name, values in {
        "vllm:num_requests_running": [3, 0],
        "vllm:generation_tokens_total": [10, 7],
        "jaxpage:replica_up": [1, 0],
    }.items():
        assert found.label_values(name, "engine") == ["0", "1"]
        assert [found[name, f"engine={i}"] for i in (0, 1)] == values
    name = "vllm:prompt_tokens_by_source_total"
    assert found[name, "source=local_compute", "engine=0"] == 5
    assert found["jaxpage:executables", "origin=compiled", "engine=1"] == 1
    assert found["jaxpage:compile_seconds_total", "origin=compiled", "engine=0"] == 0
    assert found["vllm:cache_config_info", "engine=1"] == 1
    families = [line for line in metrics.render().splitlines() if line.startswith(b"# TYPE")]
    assert len(families) == len(set(families))


def test_steps_of_replicas_overlap():
    _, metrics = make_metrics()
    for replica in (0, 1):
        step = make_step(11.0 + replica / 4, {}, launched=10.5, num_tokens=6)
        metrics.took_step(replace(step, replica=replica))
    assert scrape(metrics)["jaxpage:step_time_seconds_sum", "program=decode R=2"] == 0.5 + 0.75


def test_counters_never_fall():
    llm, metrics = make_metrics()
    for counted, shown in ((10, 10), (7, 10), (11, 11)):
        llm.tell(generation_tokens=counted)
        assert scrape(metrics)["vllm:generation_tokens_total"] == shown


def test_a_step_begins_when_it_is_launched_and_the_one_before_it_has_ended():
    _, metrics = make_metrics()
    metrics.took_step(make_step(11.0, {}, launched=10.5, num_tokens=6, fill=0.75))
    metrics.took_step(make_step(11.25, {}, launched=10.75, num_tokens=8, fill=1.0))
    metrics.took_step(make_step(21.0, {}, launched=20.0, num_tokens=3, program="sample R=8"))
    found = scrape(metrics)
    assert found["jaxpage:step_time_seconds_count", "program=decode R=2"] == 2
    assert found["jaxpage:step_time_seconds_sum", "program=decode R=2"] == 0.75
    assert found["jaxpage:step_time_seconds_sum", "program=sample R=8"] == 1.0
    assert found["jaxpage:step_bucket_fill_sum", "program=decode R=2"] == 1.75
    assert found.label_values("jaxpage:step_bucket_fill_count", "program") == ["decode R=2"]
    assert found["vllm:iteration_tokens_total_sum"] == 17


def test_programs_and_device_memory(monkeypatch):
    llm, metrics = make_metrics()
    llm.records = [
        ProgramRecord(name="admit", origin="stored", seconds=0.5),
        ProgramRecord(name="decode R=2", origin="compiled", seconds=2.0),
        ProgramRecord(name="decode R=4", origin="compiled", seconds=3.0),
        ProgramRecord(name="decode R=8"),
    ]
    device = SimpleNamespace(id=3, memory_stats=lambda: {"bytes_in_use": 7, "bytes_limit": 9})
    silent = SimpleNamespace(id=4, memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device, silent])
    found = scrape(metrics)
    assert found["jaxpage:executables", "origin=stored"] == 1
    assert found["jaxpage:executables", "origin=cached"] == 0
    assert found["jaxpage:executables", "origin=compiled"] == 2
    assert found["jaxpage:executables", "origin=pending"] == 1
    assert found["jaxpage:compile_seconds_total", "origin=compiled"] == 5.0
    assert found["jaxpage:device_memory_in_use_bytes", "device=3"] == 7
    assert found["jaxpage:device_memory_limit_bytes", "device=3"] == 9
    assert found.label_values("jaxpage:device_memory_in_use_bytes", "device") == ["3"]
    assert "jaxpage:device_memory_peak_bytes" not in found.names


def test_rejections_are_counted_by_the_limit_that_was_reached():
    _, metrics = make_metrics()
    metrics.rejected()
    metrics.rejected("max_num_queued_tokens")
    metrics.rejected()
    found = scrape(metrics)
    name = "vllm:admission_rejections_total"
    assert found[name, "reason=max_num_queued_reqs"] == 2
    assert found[name, "reason=max_num_queued_tokens"] == 1


def test_two_servers_in_one_process_count_apart():
    first, second = Metrics(StubLLM(), "a"), Metrics(StubLLM(), "b")
    first.rejected()
    request = make_request()
    first.finished(request, make_output(request))
    assert scrape(first)["vllm:e2e_request_latency_seconds_count", "model_name=a"] == 1
    assert scrape(second)["vllm:e2e_request_latency_seconds_count", "model_name=b"] == 0
    assert "vllm:admission_rejections_total" not in scrape(second).names


def test_the_text_has_prometheus_content_type():
    assert Metrics.content_type.startswith("text/plain; version=")


# A real engine.


@pytest.mark.slow
def test_tokens_counted_are_those_that_requests_had(llm):
    metrics = Metrics(llm, "demo")
    llm.observe(metrics)

    async def answer(number: int) -> tuple[int, int]:
        kind = list(RequestOutputKind)[number % 3]
        params = SamplingParams(max_tokens=5 + number, n=1 + number % 2, output_kind=kind)
        num_generated: dict[int, int] = {}
        async for output in llm.generate(f"A story about {number} dogs", params):
            for completion in output.outputs:
                before = num_generated.get(completion.index, 0)
                delta = kind is RequestOutputKind.DELTA
                length = len(completion.token_ids) + (before if delta else 0)
                num_generated[completion.index] = length
        return len(output.prompt_token_ids), sum(num_generated.values())

    async def all_of_them() -> list[tuple[int, int]]:
        return await asyncio.gather(*map(answer, range(9)))

    assert llm.stats().num_running == llm.stats().num_waiting == 0
    before = llm.stats()
    lengths = asyncio.run(all_of_them())
    num_prompt, num_generated = (sum(column) for column in zip(*lengths, strict=True))
    found = scrape(metrics)
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        assert found[f"vllm:{name}_count"] == 9
    assert found["vllm:request_prompt_tokens_sum"] == num_prompt
    assert found["vllm:request_generation_tokens_sum"] == num_generated
    assert found["vllm:prompt_tokens_total"] == num_prompt + before.prompt_tokens
    assert found["vllm:generation_tokens_total"] == num_generated + before.generation_tokens
    ended = [s for s in found.samples if s.name == "vllm:request_success_total"]
    assert sum(sample.value for sample in ended) == 9
    # Every token of the prompts was computed or found, and every token of the answers but the last of each.
    num_computed = found["vllm:iteration_tokens_total_sum"]
    num_computed += found["vllm:prefix_cache_hits_total"] - before.prefix_cache_hits
    assert num_computed >= num_prompt + num_generated - 9 - 4
    programs = found.label_values("jaxpage:step_time_seconds_count", "program")
    assert {name.split(" ")[0] for name in programs} == {"decode", "forward"}
    assert set(programs) <= {record.name for record in llm.programs()}
    fills = [s.value for s in found.samples if s.name == "jaxpage:step_bucket_fill_sum"]
    assert all(fills) and found["jaxpage:recompiles_total"] == 0
    executables = [s.value for s in found.samples if s.name == "jaxpage:executables"]
    assert sum(executables) == len(llm.programs())


@pytest.mark.slow
def test_a_consumer_that_goes_away_leaves_nothing_behind(llm):
    metrics = Metrics(llm, "demo")
    llm.observe(metrics)

    async def look_at_the_first() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = await llm.start("A story about", params)
        await anext(aiter(stream))
        stream.close()
        # An answer behind it: by then the output thread has heard of both.
        async for _ in llm.generate("A", SamplingParams(max_tokens=1)):
            pass

    asyncio.run(look_at_the_first())
    found = scrape(metrics)
    assert found["vllm:request_success_total", "finished_reason=abort"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert metrics._requests._requests == {}
