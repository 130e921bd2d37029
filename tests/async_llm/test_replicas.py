"""AsyncLLM over several fake devices, some of which fail under load."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from jaxpage import LLM, RequestOutputKind, SamplingParams
from jaxpage.async_llm import AsyncLLM, EngineDeadError, StepFailedError
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.tokenizer import load_tokenizer
from tests.fake_device import MAX_MODEL_LEN, fake_built
from tests.fakes import expected_output

KINDS = list(RequestOutputKind)


class Killed(BaseException):
    """Ends a thread."""


@pytest.fixture
def make_built(tiny_folder):
    hf_config, tokenizer = load_hf_config(tiny_folder), load_tokenizer(tiny_folder)

    def make(*, kills: dict[int, int], num_replicas: int = 2):
        """`kills`: replica -> the step in which its thread ends."""
        options = {"num_replicas": num_replicas, "data_parallel_size": num_replicas}
        built = fake_built(tiny_folder, hf_config, tokenizer, **options)
        for number, runner in enumerate(built.runners):
            runner.collect = _or_kill(runner.collect, kills.get(number))
        return built

    return make


def _or_kill(collect, step: int | None):
    def collect_or_kill(launched: int):
        time.sleep(0.001)
        if launched == step:
            raise Killed
        return collect(launched)

    return collect_or_kill


def params(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=5 + number % 30,
        ignore_eos=True,
        seed=number,
        n=1 + number % 2,
        output_kind=KINDS[number % 3],
    )


def expected(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        prompt_embeds=None,
        pictures=None,
        mask_source=None,
        adapter=None,
        params=params,
        seed=params.seed,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
    )
    return [expected_output(request, i, MAX_MODEL_LEN)[0] for i in range(params.n)]


async def answer(llm: AsyncLLM, number: int) -> tuple[list[list[int]], Exception | None]:
    """The tokens of each continuation, and why there are no more."""
    wanted = params(number)
    found: list[list[int]] = [[] for _ in range(wanted.n)]
    num_last = 0
    try:
        async for output in llm.generate([3 + number % 9, 4], wanted):
            num_last += output.finished
            for completion in output.outputs:
                whole = [] if wanted.output_kind is not KINDS[1] else found[completion.index]
                found[completion.index] = whole + completion.token_ids
    except StepFailedError as error:
        return found, error
    assert num_last == 1
    return found, None


def test_a_thread_that_is_killed_under_load_costs_only_what_was_streamed(make_built, caplog):
    llm = AsyncLLM.from_built(make_built(kills={1: 12}))

    async def run():
        found = await asyncio.gather(*(answer(llm, i) for i in range(60)))
        await llm.check_health()
        return found, await asyncio.gather(*(answer(llm, i) for i in range(10)))

    found, later = asyncio.run(run())
    for number, (tokens, error) in enumerate([*found, *later]):
        number %= 60
        wanted = expected([3 + number % 9, 4], params(number))
        if error is None:
            assert tokens == wanted
        else:
            assert params(number).output_kind is not RequestOutputKind.FINAL_ONLY
            assert any(tokens)
            assert all(w[: len(t)] == t for t, w in zip(tokens, wanted, strict=True))
            assert "replica 1 has failed and was taken out" in str(error)
    assert any(error for _, error in found)
    stats = llm.stats()
    assert stats.num_failed_replicas == 1 and len(stats.replicas) == 2
    assert stats.num_running == stats.num_waiting == stats.num_blocks_used == 0
    assert "replica 1 has failed and is taken out; 1 of 2 are left" in caplog.text
    assert asyncio.run(llm.with_schedulers(lambda scheduler: 0)) == {0: 0}
    with pytest.raises(ValueError, match="no replica 1"):
        asyncio.run(llm.kv_snapshot(1))
    assert asyncio.run(llm.kv_snapshot()).num_steps > 0
    llm.shutdown()


def test_the_last_replica_takes_the_engine_with_it(make_built):
    llm = AsyncLLM.from_built(make_built(kills={0: 8, 1: 8}))

    async def run():
        await asyncio.gather(*(answer(llm, i) for i in range(20)), return_exceptions=True)
        with pytest.raises(EngineDeadError, match="all 2 replicas have failed"):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await answer(llm, 0)

    asyncio.run(run())
    llm.shutdown()


def test_a_request_chooses_its_replica(make_built):
    llm = AsyncLLM.from_built(make_built(kills={0: 30}))

    params = SamplingParams(seed=1, output_kind=RequestOutputKind.FINAL_ONLY)

    async def ask(rank: int | None) -> None:
        async for _ in llm.generate([5, 6], params, data_parallel_rank=rank):
            pass

    async def run():
        for _ in range(3):  # where no other prefix is cached
            await ask(1)
        steps = [part.num_steps for part in llm.stats().replicas]
        assert steps[0] == 0 and steps[1] > 0
        await ask(0)
        assert llm.stats().replicas[0].num_steps > 0
        with pytest.raises(ValueError, match="one of 0 to 1, got 2"):
            await ask(2)
        for _ in range(30):
            if llm.stats().num_failed_replicas:
                break
            await ask(0)
        with pytest.raises(ValueError, match="replica 0 has failed"):
            await ask(0)
        await ask(None)

    asyncio.run(run())
    llm.shutdown()


def test_a_batch_survives(make_built):
    llm = LLM.from_built(make_built(kills={0: 9}, num_replicas=3))
    prompts = [[3 + number % 9, 4] for number in range(40)]
    outputs = llm.generate(prompts, [params(i) for i in range(40)], use_tqdm=False)
    for number, output in enumerate(outputs):
        wanted = expected(prompts[number], params(number))
        assert [completion.token_ids for completion in output.outputs] == wanted
    assert llm.stats().num_failed_replicas == 1
    assert llm.kv_snapshot(2).num_steps == llm.stats().replicas[2].num_steps
    with pytest.raises(ValueError, match="no replica 0"):
        llm.kv_snapshot()


def test_step_by_step_what_was_shown_is_lost_with_an_error(make_built):
    llm = LLM.from_built(make_built(kills={0: 9, 1: 9}))
    for i in range(8):
        llm.add_request(str(i), [3 + i, 4], SamplingParams(max_tokens=50, ignore_eos=True, seed=i))
    errors = 0
    while llm.has_unfinished_requests():
        try:
            llm.step()
        except StepFailedError as error:
            assert "has failed and was taken out" in str(error)
            errors += 1
    assert errors == 2
    with pytest.raises(EngineDeadError, match="all 2 replicas have failed"):
        llm.add_request("late", [3], SamplingParams())
    assert not llm.has_unfinished_requests()
