"""AsyncLLM on a fake device: the answers of `LLM`, whatever is asked at the same time, aborted, paused or broken."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
import time
from types import SimpleNamespace

import pytest

from jaxpage import EngineArgs, RequestOutputKind, SamplingParams
from jaxpage.async_llm import AsyncLLM, EngineDeadError, StepFailedError
from jaxpage.async_llm.step_loop import PauseMode
from jaxpage.async_llm.streams import LastOutput, merge_deltas
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.hosts.errors import HostLostError
from jaxpage.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxpage.tokenizer import load_tokenizer
from tests.fake_device import EOS, MAX_MODEL_LEN, NUM_BLOCKS, fake_built
from tests.fakes import expected_output

KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def make_engines(tiny_folder):
    folder = tiny_folder
    hf_config, tokenizer = load_hf_config(folder), load_tokenizer(folder)
    made = []

    def make(num_replicas: int, *, step_seconds: float = 0.0, **options) -> AsyncLLM:
        built = fake_built(folder, hf_config, tokenizer, num_replicas=num_replicas, **options)
        for runner in built.runners if step_seconds else ():
            runner.collect = slowly(runner.collect, step_seconds)
        made.append(AsyncLLM.from_built(built))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxpage-replica")]


def slowly(collect, seconds: float):
    def slow_collect(launched):
        time.sleep(seconds)
        return collect(launched)

    return slow_collect


@pytest.fixture
def make_one(make_engines):
    return functools.partial(make_engines, 1)


@pytest.fixture(params=[1, 2], ids=["one engine", "two replicas"])
def make(request, make_engines):
    return functools.partial(make_engines, request.param)


def long(kind=RequestOutputKind.CUMULATIVE, **options) -> SamplingParams:
    return SamplingParams(max_tokens=40, ignore_eos=True, seed=3, output_kind=kind, **options)


def expected(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    eos = frozenset() if params.ignore_eos else frozenset([EOS])
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        prompt_embeds=None,
        pictures=None,
        mask_source=None,
        adapter=None,
        params=params,
        seed=params.seed,
        eos_token_ids=eos,
        stop_token_ids=eos | frozenset(params.stop_token_ids),
    )
    return [expected_output(request, i, MAX_MODEL_LEN)[0] for i in range(params.n)]


def test_the_engine_s_stream_interval_and_a_priority_without_its_policy(make):
    llm = make(stream_interval=4)

    async def run() -> list[int]:
        outputs = llm.generate([5, 6], long(RequestOutputKind.DELTA), priority=-1)
        return [len(output.outputs[0].token_ids) async for output in outputs]

    counts = asyncio.run(run())
    assert sum(counts) == 40 and all(count >= 4 for count in counts[1:-1])


async def collect(llm: AsyncLLM, prompt, params, request_id=None) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


def tokens(outputs: list[RequestOutput], params: SamplingParams) -> list[list[int]]:
    """All tokens of each continuation, from outputs of any kind."""
    if params.output_kind is not RequestOutputKind.DELTA:
        return [c.token_ids for c in outputs[-1].outputs]
    found: list[list[int]] = [[] for _ in range(params.n)]
    for output in outputs:
        for completion in output.outputs:
            found[completion.index] += completion.token_ids
    return found


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def is_empty(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    return stats.num_running == stats.num_waiting == stats.num_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_many_at_once_get_the_answers_of_each_alone(make, overlap):
    llm = make(async_scheduling=overlap)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 13) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 30), seed=i, n=1 + i % 3, output_kind=KINDS[i // 3 % 3]
        )
        for i in range(60)
    ]

    async def run():
        return await asyncio.gather(*map(collect, [llm] * 60, prompts, params))

    for prompt, p, outputs in zip(prompts, params, asyncio.run(run()), strict=True):
        assert tokens(outputs, p) == expected(prompt, p)
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        if p.output_kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
    assert is_empty(llm)


def test_stop_strings_end_a_text_and_its_name_is_free_again(make):
    """At once: a step that was under way for the first request of this name says nothing to the second."""
    llm = make(step_seconds=0.002)

    async def run():
        (whole,) = await collect(llm, [5, 6, 7], long(RequestOutputKind.FINAL_ONLY))
        text = whole.outputs[0].text
        stop = text[len(text) // 2 :][:2]
        for kind in KINDS * 3:
            params = long(kind, stop=stop)
            outputs = await collect(llm, [5, 6, 7], params, "one name")
            assert outputs[-1].outputs[0].stop_reason == stop
            assert {o.request_id for o in outputs} == {"one name"}
            texts = [o.outputs[0].text for o in outputs]
            got = "".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]
            assert got == text[: text.index(stop)]
        await until(lambda: is_empty(llm))

    asyncio.run(run())


def test_a_name_in_use_is_refused_and_the_first_request_goes_on(make):
    llm = make(step_seconds=0.005)

    async def run():
        first = asyncio.create_task(collect(llm, [5, 6], long(), "name"))
        await until(lambda: llm.stats().num_running)
        with pytest.raises(ValueError, match="'name' is in use"):
            await collect(llm, [5, 6], long(), "name")
        assert tokens(await first, long()) == expected([5, 6], long())

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([3] * MAX_MODEL_LEN, "64 tokens"),
        ([600], "vocabulary"),
        ({"x": 1}, "a prompt"),
    ],
)
def test_bad_prompts_are_refused_before_anything_changes(make, prompt, message):
    llm = make()
    with pytest.raises(ValueError, match=message):
        asyncio.run(collect(llm, prompt, long()))
    with pytest.raises(ValueError, match=message):
        llm.submit(prompt, long()).result(5)
    assert llm.stats().num_steps == 0


def test_another_number_of_requests_than_of_prompts_is_refused_before_any_is_added(make):
    llm = make()
    (future,) = llm._tasks.submit(
        lambda inputs: inputs.requests(inputs.parse([[5], [6]]), long()), 1
    )
    with pytest.raises(ValueError, match="2 requests were made for 1 "):
        future.result(5)
    assert llm.stats().num_steps == 0 and not llm._tasks._ids
    assert [c.token_ids for c in llm.submit([5], long()).result(5).outputs] == expected([5], long())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_comes_after_the_end_of_a_request_is_ignored(is_cancelled):
    receiver, first = LastOutput(), ValueError("the first")
    if is_cancelled:
        receiver.future.cancel()
    for error in (first, ValueError("the second")):
        receiver.receive(error)
    assert receiver.is_closed == is_cancelled
    assert is_cancelled or receiver.future.exception(0) is first


def test_a_request_that_waits_for_the_tokenizer_can_be_aborted(make):
    llm, goes_on = make(step_seconds=0.001), threading.Event()

    async def run():
        slow = asyncio.create_task(llm.with_inputs(lambda _: goes_on.wait(10)))
        await asyncio.sleep(0)  # it is called first
        tasks = [asyncio.create_task(collect(llm, [5], long(), name)) for name in "ab"]
        await asyncio.sleep(0)
        await llm.abort(["b", "unknown"])
        goes_on.set()
        assert await slow
        whole, aborted = [(await task)[-1].outputs[0] for task in tasks]
        assert (whole.finish_reason, aborted.finish_reason) == ("length", "abort")
        # The name is free again, and what has it now is not aborted.
        assert (await collect(llm, [5], long(), "b"))[-1].outputs[0].finish_reason == "length"
        await until(lambda: is_empty(llm))

    asyncio.run(run())
    llm.shutdown()
    asyncio.run(llm.abort("b"))  # ignored


@pytest.mark.parametrize("how", ["break", "cancel", "abort", "close at once"])
def test_who_goes_away_leaves_nothing_behind(make, how):
    llm = make(step_seconds=0.002)

    async def run():
        if how == "break":
            outputs = llm.generate([5, 6], long())
            async for _ in outputs:
                break
            await outputs.aclose()
        elif how == "cancel":
            task = asyncio.create_task(collect(llm, [5, 6], long()))
            await until(lambda: llm.stats().num_running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "abort":
            task = asyncio.create_task(collect(llm, [5, 6], long(), "mine"))
            await until(lambda: llm.stats().generation_tokens > 3)
            await llm.abort("mine")
            completion = (await task)[-1].outputs[0]
            assert completion.finish_reason == "abort"
            assert completion.token_ids == expected([5, 6], long())[0][: len(completion.token_ids)]
        else:
            for delay in (0, 0.0005, 0.001):
                task = asyncio.create_task(llm.start([5, 6], long()))
                await asyncio.sleep(delay)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    (await task).close()
                    raise asyncio.CancelledError
        await until(lambda: is_empty(llm))
        assert tokens(await collect(llm, [5, 6], long()), long()) == expected([5, 6], long())

    asyncio.run(run())
    assert not llm._tasks._ids


def test_threads_submit_and_one_of_them_cancels(make):
    llm = make(step_seconds=0.001)
    params = [SamplingParams(max_tokens=20, seed=i, n=1 + i % 2) for i in range(64)]
    got = {}

    def work(i):
        got[i] = llm.submit([5, 3 + i % 9], params[i]).result(30)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    cancelled = llm.submit([4], long())
    while not llm.stats().num_running:
        time.sleep(0.001)
    assert cancelled.cancel()
    for thread in threads:
        thread.join()
    for i, output in got.items():
        assert tokens([output], params[i]) == expected([5, 3 + i % 9], params[i])
    asyncio.run(until(lambda: is_empty(llm)))


def test_two_event_loops_share_one_engine_and_one_ends_early(make):
    llm = make(step_seconds=0.001)
    abandoned = threading.Thread(
        target=lambda: asyncio.run(asyncio.wait_for(_read_little(llm), timeout=5))
    )
    abandoned.start()

    async def run():
        outputs = await asyncio.gather(*(collect(llm, [7, i], long()) for i in range(3, 9)))
        for i, found in zip(range(3, 9), outputs, strict=True):
            assert tokens(found, long()) == expected([7, i], long())
        abandoned.join()
        await until(lambda: is_empty(llm))

    asyncio.run(run())


def test_several_prompts_start_together_or_not_at_all(make):
    llm = make(step_seconds=0.001)
    prompts = [[5, 6], [7, 8, 9]]

    def read(inputs):
        return [inputs.parse(prompt)[0] for prompt in prompts], long()

    def read_one_too_long(inputs):
        found, params = read(inputs)
        found[1] = inputs.parse([5] * (MAX_MODEL_LEN + 1))[0]
        return found, params

    async def run():
        with pytest.raises(ValueError, match="longer|max_model_len"):
            await llm.start_all(read_one_too_long, ["a", "b"])
        assert not llm._tasks._ids and is_empty(llm)
        for stream, prompt in zip(await llm.start_all(read, ["a", "b"]), prompts, strict=True):
            found = [output async for output in stream]
            assert tokens(found, long()) == expected(prompt, long())

    asyncio.run(run())


async def _read_little(llm: AsyncLLM) -> None:
    """And leave the stream open when the loop ends."""
    stream = await llm.start([3, 4], long())
    await anext(stream)


def test_a_slow_reader_gets_merged_deltas(make):
    llm = make(step_seconds=0.003)

    async def run():
        stream = await llm.start([5, 6], long(RequestOutputKind.DELTA, n=2, logprobs=1))
        await until(lambda: stream._output is not None and stream._output.finished)
        outputs = [output async for output in stream]
        assert len(outputs) == 1 and outputs[0].finished
        assert [c.token_ids for c in outputs[0].outputs] == expected([5, 6], long(n=2))
        assert [len(c.logprobs) for c in outputs[0].outputs] == [40, 40]
        assert outputs[0].outputs[0].text

    asyncio.run(run())


def test_merged_deltas_say_what_both_say():
    def delta(*completions, finished=False):
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[1],
            prompt_logprobs=None,
            outputs=[
                CompletionOutput(
                    index=i, text=text, token_ids=ids, cumulative_logprob=None, logprobs=None,
                    finish_reason=reason,
                )
                for i, text, ids, reason in completions
            ],
            finished=finished,
            metrics=RequestStateStats(),
        )  # fmt: skip

    first = delta((1, "a", [1], None), (0, "b", [2], "stop"))
    second = delta((1, "c", [3, 4], "length"), (2, "d", [5], None), finished=True)
    merged = merge_deltas(first, second)
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in merged.outputs] == [
        (0, "b", [2], "stop"),
        (1, "ac", [1, 3, 4], "length"),
        (2, "d", [5], None),
    ]
    assert merged.finished


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("overlap", [False, True])
def test_pausing(make, mode, overlap):
    llm = make(step_seconds=0.002, async_scheduling=overlap)

    async def run():
        running = [asyncio.create_task(collect(llm, [5, i], long(), str(i))) for i in range(3, 7)]
        await until(lambda: llm.stats().generation_tokens > 8)
        await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        late = asyncio.create_task(collect(llm, [9], long()))
        num_steps = llm.stats().num_steps
        await asyncio.sleep(0.03)
        assert llm.stats().num_steps == num_steps and not late.done()
        # The cache was cleared, also of what is kept.
        assert llm.stats().num_blocks_used == 0
        if mode != "keep":
            assert all(task.done() for task in running)
        await llm.resume_generation()
        assert not await llm.is_paused()
        for i, task in zip(range(3, 7), running, strict=True):
            completion = (await task)[-1].outputs[0]
            whole = expected([5, i], long())[0]
            assert completion.token_ids == whole[: len(completion.token_ids)]
            assert completion.finish_reason == ("abort" if mode == "abort" else "length")
        assert tokens(await late, long()) == expected([9], long())
        await until(lambda: is_empty(llm))

    asyncio.run(run())


def test_level_0_of_sleep_is_a_pause(make):
    llm = make()

    async def run():
        await llm.sleep(level=0)
        assert await llm.is_paused() and not await llm.is_sleeping()
        late = asyncio.create_task(collect(llm, [9], long()))
        await asyncio.sleep(0.03)
        assert not late.done()
        await llm.wake_up(tags=["scheduling"])
        assert tokens(await late, long()) == expected([9], long())

    asyncio.run(run())


def test_a_pause_begins_where_its_engine_is_found_awake(make_one, monkeypatch):
    """In between, the engine could fall asleep."""
    llm = make_one()
    steps, found = llm._tasks.steps, []
    monkeypatch.setattr(
        llm, "_check_awake", lambda: steps.post(lambda: found.append(steps.is_paused))
    )
    asyncio.run(llm.pause_generation(mode="wait"))
    assert found == [True]


def test_an_engine_does_not_sleep_while_another_caller_s_pause_lets_steps_run(
    make_one, monkeypatch
):
    llm = make_one(step_seconds=0.01)
    steps, slept = llm._tasks.steps, []
    llm._memory = SimpleNamespace(lacks=None, sleep=lambda **_: slept.append(True))

    async def run():
        task = asyncio.create_task(collect(llm, [5], long()))
        await until(lambda: llm.stats().num_running)

        async def pause_and_wait(**_):
            await llm._call(lambda: steps.pause(PauseMode.KEEP))
            await llm._call(lambda: steps.pause(PauseMode.WAIT))  # another caller's

        monkeypatch.setattr(llm, "pause_generation", pause_and_wait)
        with pytest.raises(RuntimeError, match="steps still run.* pause in mode 'wait'.*again"):
            await llm.sleep(mode="keep")
        assert not slept
        assert tokens(await task, long()) == expected([5], long())
        await until(lambda: not llm.stats().num_running)
        await llm.sleep(mode="keep")
        assert slept == [True]

    asyncio.run(run())


def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(make):
    llm = make()

    async def run():
        await llm.pause_generation()
        task = asyncio.create_task(collect(llm, [9], long(), "late"))
        await until(lambda: "late" in llm._tasks._ids)
        await llm.abort("late")
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        await llm.resume_generation()
        with pytest.raises(ValueError, match="mode must be one of"):
            await llm.pause_generation(mode="later")

    asyncio.run(run())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_its_requests_and_others_go_on(make_one, overlap, caplog):
    llm = make_one(fail_collect=(3,), step_seconds=0.002, async_scheduling=overlap)

    async def run():
        failing = asyncio.create_task(collect(llm, [5, 6], long()))
        with pytest.raises(StepFailedError, match="the step that computed this request failed"):
            await failing
        await llm.check_health()
        assert tokens(await collect(llm, [7], long()), long()) == expected([7], long())
        await until(lambda: is_empty(llm))

    asyncio.run(run())
    assert "a step has failed" in caplog.text


def test_tokens_that_are_known_before_a_step_fails_are_delivered(make_one, caplog):
    """The output thread is late: when it goes on, it finds a step and the failure of the next one."""
    llm = make_one(fail_collect=(2,), async_scheduling=False)

    def wait_for_the_failure(step):
        deadline = time.monotonic() + 10
        while "a step has failed" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.001)
        # The failure is logged just before it is posted.
        time.sleep(0.05)

    params = long(RequestOutputKind.DELTA)
    observer = SimpleNamespace(
        added=lambda request: None,
        took_step=wait_for_the_failure,
        finished=lambda request, output: None,
        dropped=lambda request, error: None,
    )
    llm.observe(observer)
    found = []

    async def run():
        async for output in await llm.start([5, 6], params):
            found.extend(output.outputs[0].token_ids)

    with pytest.raises(StepFailedError):
        asyncio.run(run())
    assert found == expected([5, 6], params)[0][:2]


class FakeHosts:
    """Other hosts of an engine, one of which is lost when the test says so."""

    def when_lost(self, callback):
        self.lose = callback


def test_a_lost_host_is_the_end_while_nothing_runs(make_one):
    hosts = FakeHosts()
    llm = make_one(hosts=hosts)

    async def run():
        await collect(llm, [5, 6], long())
        hosts.lose(HostLostError("host 1 is lost"))
        await until(lambda: llm.errored)
        with pytest.raises(EngineDeadError, match="host 1 is lost"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="host 1 is lost"):
            await collect(llm, [5], long())

    asyncio.run(run())


def test_a_step_without_all_hosts_is_the_end(make_one, monkeypatch):
    """At once: it need not fail three times."""
    llm = make_one(hosts=FakeHosts())

    def lost(launched):
        raise HostLostError("host 1 is lost")

    monkeypatch.setattr(llm._tasks.engine.runner, "collect", lost)

    async def run():
        results = await asyncio.gather(
            *(collect(llm, [5, i], long()) for i in range(9)), return_exceptions=True
        )
        assert all("host 1 is lost" in str(r) for r in results)
        assert {type(r) for r in results} == {EngineDeadError}

    asyncio.run(run())
    assert llm.errored


def test_step_after_step_failing_is_the_end(make_one, caplog):
    llm = make_one(fail_collect=tuple(range(50)))

    async def run():
        # More than a step takes, so that some are left when the engine gives up.
        tasks = [asyncio.create_task(collect(llm, [5] * 30, long())) for _ in range(40)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(r) for r in results} <= {StepFailedError, EngineDeadError}
        with pytest.raises(EngineDeadError, match="3 steps failed in a row"):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, [5], long())
        assert llm.errored and not llm.is_running
        assert llm.is_stopped and "3 steps failed" in str(llm.dead_error)

    asyncio.run(run())
    with pytest.raises(EngineDeadError):
        llm.submit([5], long()).result(5)


def test_a_detokenizer_that_fails_ends_its_request_alone(make, monkeypatch, caplog):
    llm = make()

    async def run():
        stream = await llm.start([5, 6], long())
        other = asyncio.create_task(collect(llm, [7], long()))
        return stream, await other

    from jaxpage.tokenizer import Detokenizer

    append, bad = Detokenizer.append, []

    def sometimes(self, *args, **kwargs):
        if not bad:
            bad.append(self)
        if bad[0] is self:
            raise RuntimeError("no such character")
        return append(self, *args, **kwargs)

    monkeypatch.setattr(Detokenizer, "append", sometimes)

    async def both():
        stream, outputs = await run()
        assert tokens(outputs, long()) == expected([7], long())
        with pytest.raises(RuntimeError, match="no such character"):
            async for _ in stream:
                pass
        await until(lambda: is_empty(llm))

    asyncio.run(both())


@pytest.mark.parametrize("first", ["engine", "output"])
def test_a_tokenizer_that_fails_on_a_prompt_ends_its_request_alone(
    make, monkeypatch, caplog, first
):
    """Whichever of the two threads hears of the request first."""
    from jaxpage.tokenizer import Detokenizer

    llm, goes_on = make(step_seconds=0.001), threading.Event()
    tasks = llm._tasks
    make_one = Detokenizer.__init__

    def sometimes(self, tokenizer, params, prompt_token_ids=()):
        if 6 in prompt_token_ids:
            raise RuntimeError("no such token")
        make_one(self, tokenizer, params, prompt_token_ids)

    monkeypatch.setattr(Detokenizer, "__init__", sometimes)
    if first == "engine":
        tasks.outputs.post(lambda: goes_on.wait(10))
    else:
        call = tasks.steps.call
        monkeypatch.setattr(tasks.steps, "call", lambda action: goes_on.wait(10) and call(action))
    bad = llm.submit([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    bad.add_done_callback(lambda _: goes_on.set())
    if first == "engine":
        asyncio.run(until(lambda: llm.stats().num_running == 1))
        goes_on.set()
    with pytest.raises(RuntimeError, match="no such token"):
        bad.result(5)
    assert llm.submit([7], long()).result(5).outputs[0].token_ids == expected([7], long())[0]
    assert llm.stats().generation_tokens < 60, "it was computed although nobody waits"
    assert "cannot be detokenised: RuntimeError('no such token')" in caplog.text
    assert "in sometimes" in caplog.text, "the log does not say where it was raised"
    asyncio.run(until(lambda: is_empty(llm)))
    assert not tasks._ids and not llm.errored


@pytest.mark.parametrize("method", ["decode_token", "flush"])
def test_a_tokenizer_that_fails_on_an_output_ends_its_request_alone(make, monkeypatch, method):
    from jaxpage.tokenizer import Detokenizer

    llm = make()
    original = getattr(Detokenizer, method)

    def sometimes(self, *args):
        if self._include_stop:  # of the first request only
            raise RuntimeError("no such token")
        return original(self, *args)

    monkeypatch.setattr(Detokenizer, method, sometimes)
    bad = llm.submit([5, 6], long(logprobs=1, include_stop_str_in_output=True))
    good = llm.submit([7], long(logprobs=1))
    with pytest.raises(RuntimeError, match="no such token"):
        bad.result(5)
    assert good.result(5).outputs[0].token_ids == expected([7], long())[0]
    asyncio.run(until(lambda: is_empty(llm)))
    assert not llm._tasks._ids and not llm.errored


def test_options_of_vllm_s_constructor_are_taken_or_refused(monkeypatch, tiny_folder):
    monkeypatch.setattr(AsyncLLM, "_build", lambda self, options: None)
    args = EngineArgs(model=tiny_folder)
    AsyncLLM.from_engine_args(args, True, "the context", stat_loggers=None)
    with pytest.raises(ValueError, match="start_engine_loop=False"):
        AsyncLLM.from_engine_args(args, start_engine_loop=False)
    with pytest.raises(ValueError, match="stat_loggers are not supported"):
        AsyncLLM.from_engine_args(args, stat_loggers=[print])


def test_attributes_of_vllm_that_are_absent_say_what_to_use(make):
    llm = make()
    for name, instead in {"add_request": r"await start\(\)", "vllm_config": "all options"}.items():
        with pytest.raises(AttributeError, match=f"'AsyncLLM' object .*{name}.*{instead}"):
            getattr(llm, name)


def test_shutting_down_ends_requests_with_an_error(make):
    llm = make(step_seconds=0.01)

    async def run():
        task = asyncio.create_task(collect(llm, [5, 6], long()))
        future = llm.submit([5, 7], long())
        await until(lambda: llm.stats().num_running == 2)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(5)
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm, [5], long())

    asyncio.run(run())
    llm.shutdown()  # again does nothing


def test_shutting_down_ends_requests_that_wait_for_the_tokenizer(make):
    llm, goes_on = make(), threading.Event()

    async def run():
        slow = asyncio.create_task(llm.with_inputs(lambda _: goes_on.wait(10)))
        await asyncio.sleep(0)  # it is called first
        future = llm.submit([5], long())
        waiting = [
            asyncio.create_task(coroutine)
            for coroutine in (
                collect(llm, [5], long()),
                llm.start([5], long()),
                llm.with_inputs(lambda _: None),
            )
        ]
        cancelled = asyncio.create_task(llm.start([5], long()))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.to_thread(llm.shutdown)
        goes_on.set()
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(5)
        async with asyncio.timeout(5):
            ends = await asyncio.gather(*waiting, cancelled, return_exceptions=True)
            assert await slow
        assert [type(end) for end in ends] == [EngineDeadError] * 3 + [asyncio.CancelledError]

    asyncio.run(run())


@pytest.mark.parametrize("thread", ["steps", "outputs"])
def test_the_garbage_collector_may_end_an_engine_in_its_own_threads(make, thread):
    llm = make(step_seconds=0.01)
    tasks = llm._tasks
    future = llm.submit([5], long())
    asyncio.run(until(lambda: llm.stats().num_running == 1))
    getattr(tasks, thread).post(tasks.shut_down)
    with pytest.raises(EngineDeadError, match="shut down"):
        future.result(5)
    for ending in tasks._threads:
        ending.join(5)
        assert not ending.is_alive()


def test_a_replica_s_thread_that_ends_the_engine_does_not_wait_for_who_waits_for_it(make_engines):
    llm = make_engines(2)
    tasks = llm._tasks

    def reset() -> None:
        tasks.engine._all[0].call(tasks.shut_down)
        tasks.engine.reset_prefix_cache()  # waits until the replica has ended the engine

    tasks.steps.post(reset)
    for ending in tasks._threads:
        ending.join(5)
        assert not ending.is_alive()


def test_an_output_thread_that_fails_ends_all_requests_also_those_it_has_not_heard_of(make, caplog):
    llm, goes_on = make(step_seconds=0.01), threading.Event()

    def fail() -> None:
        goes_on.wait(10)
        raise RuntimeError("a bug")

    llm._tasks.outputs.post(fail)
    asyncio.run(until(lambda: not llm._tasks.outputs._mailbox._actions.qsize()))
    futures = [llm.submit([5, i], long()) for i in range(3)]
    asyncio.run(until(lambda: llm.stats().num_running == 3))
    goes_on.set()
    for future in futures:
        with pytest.raises(EngineDeadError, match="the output thread has failed.*a bug"):
            future.result(5)
    asyncio.run(until(lambda: llm.errored))
    assert not llm._tasks._ids


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_threads_end_with_their_engine(tiny_folder, num_replicas):
    before = {t for t in threading.enumerate() if t.name.startswith("jaxpage-")}
    folder = tiny_folder
    hf_config, tokenizer = load_hf_config(folder), load_tokenizer(folder)
    llm = AsyncLLM.from_built(fake_built(folder, hf_config, tokenizer, num_replicas=num_replicas))
    assert llm.submit([5], long()).result(10).finished
    del llm
    gc.collect()
    after = {t for t in threading.enumerate() if t.name.startswith("jaxpage-")} - before
    for thread in after:
        thread.join(5)
    assert not any(t.is_alive() for t in after)


def test_the_cache_is_reset_unless_requests_hold_blocks(make):
    llm = make(step_seconds=0.003)

    async def run():
        task = asyncio.create_task(collect(llm, [5] * 9, long()))
        await until(lambda: llm.stats().generation_tokens > 3)
        assert not await llm.reset_prefix_cache()
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        assert tokens(await task, long()) == expected([5] * 9, long())
        assert await llm.reset_prefix_cache()
        assert llm.stats().num_blocks % (NUM_BLOCKS - 1) == 0

    asyncio.run(run())


def test_observers_hear_of_steps_and_ends(make):
    llm = make()
    added, steps, ended = [], [], []
    llm.observe(
        SimpleNamespace(
            added=lambda request: added.append(request.params.seed),
            took_step=lambda step: steps.append(step),
            finished=lambda request, output: ended.append((request.params.seed, output.finished)),
            dropped=lambda request, error: ended.append((request.params.seed, error)),
        )
    )
    asyncio.run(collect(llm, [5, 6], long()))
    assert sum(len(ids) for step in steps for ids in step.token_ids) == 40
    # The prompt, and every token of the answer but the last.
    assert sum(step.num_tokens for step in steps) == 2 + 39
    launches = [(step.launch_time, step.time) for step in steps if step.num_tokens]
    assert launches == sorted(launches) and all(0 < start <= end for start, end in launches)
    assert added == [3] and ended == [(3, True)]


def test_observers_hear_why_a_request_has_no_last_output(make):
    llm = make(step_seconds=0.003)
    dropped = []
    llm.observe(
        SimpleNamespace(
            added=lambda request: None,
            took_step=lambda step: None,
            finished=lambda request, output: dropped.append(output),
            dropped=lambda request, error: dropped.append(error),
        )
    )

    async def run():
        stream = await llm.start([5, 6], long())
        await anext(aiter(stream))
        stream.close()
        await until(lambda: dropped)
        stream = await llm.start([5, 6], long())
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    asyncio.run(run())
    assert dropped[0] is None and isinstance(dropped[1], EngineDeadError) and len(dropped) == 2


def test_observers_learn_the_trace_headers_of_a_request(make):
    llm, seen = make(), []
    llm.observe(
        SimpleNamespace(
            added=lambda request: seen.append(request.trace_headers),
            took_step=lambda step: None,
            finished=lambda request, output: seen.append(request.trace_headers),
            dropped=lambda request, error: None,
        )
    )
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

    async def run():
        async for _ in llm.generate([5, 6], long(), trace_headers=headers):
            pass

    asyncio.run(run())
    assert seen == [headers, headers]


def test_an_observer_that_fails_costs_nobody_an_answer(make, caplog):
    llm = make()
    llm.observe(SimpleNamespace())  # it has none of the methods
    assert tokens(asyncio.run(collect(llm, [5, 6], long())), long()) == expected([5, 6], long())
    assert "SimpleNamespace has failed" in caplog.text


def test_the_wait_for_the_tokenizer_is_part_of_the_time_to_the_first_token(make):
    llm = make()
    llm._tasks.with_inputs(lambda inputs: time.sleep(0.2))
    output = llm.submit([5], long()).result(10)
    assert output.metrics.first_token_latency > 0.15


def test_chat_reads_its_last_output(make):
    llm = make(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")

    async def run():
        messages = [{"role": "user", "content": "the dog"}]
        outputs = [o async for o in llm.chat(messages, long())]
        assert outputs[-1].prompt == "the dog"
        assert outputs[-1].outputs[0].content == outputs[-1].outputs[0].text
        with pytest.raises(ValueError, match="takes one conversation, got 2"):
            async for _ in llm.chat([messages, messages], long()):
                pass

    asyncio.run(run())
