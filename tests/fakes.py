"""Cheap doubles: a device that checks what it is told, a detokenizer of one letter per token.

`FakeRunner` keeps what a real device keeps (token histories, block tables, block contents) and
moves it exactly as the plan says, asynchronously. It does not compute KV: the "KV" of a token is a
digest of all tokens up to it, so a row that reads a slot it should not read is found out at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxpage.engine.beams import Beams
from jaxpage.plan import NULL_BLOCK, NULL_SLOT, StepPlan, StepResult
from jaxpage.request import FinishReason, Request, Sequence
from jaxpage.sampling_params import SamplingParams

VOCAB_SIZE = 13


def make_request(request_id: str, prompt: list[int], **kwargs) -> Request:
    """A request without text. `salt`, `priority`, `eos`, `seed` are its own, the rest params."""
    salt, priority = kwargs.pop("salt", None), kwargs.pop("priority", 0)
    eos, seed = frozenset(kwargs.pop("eos", ())), kwargs.pop("seed", 0)
    params = SamplingParams(**kwargs)
    if params.ignore_eos:
        eos = frozenset()
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        stop_token_ids=eos | frozenset(params.stop_token_ids),
        eos_token_ids=eos,
        cache_salt=salt,
        priority=priority,
    )


class FakeDetokenizer:
    """Token i is the letter i of the alphabet."""

    def __init__(self, request: Request):
        self.stop = request.params.stop
        self.text = ""

    def append(self, token_id: int, *, ends: bool, check_stop: bool) -> str | None:
        if ends:
            return None
        self.text += chr(ord("a") + token_id % 26)
        found = [s for s in self.stop if check_stop and self.text.endswith(s)]
        return found[0] if found else None

    def flush(self) -> None:
        pass

    def decode_token(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)


def extend_digest(digest: int, token_id: int) -> int:
    """Stands for the KV of a token: it depends on all tokens so far."""
    return hash((digest, token_id))


def next_token(digest: int, *, seed: int, index: int, banned: frozenset[int]) -> int:
    """Stands for model and sampler: a function of the history, the seed and the sequence index."""
    token_id = hash((digest, seed, index)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_output(
    request: Request, index: int, max_model_len: int
) -> tuple[list[int], FinishReason, int | str | None]:
    """Tokens, finish and stop reason by a loop that knows nothing of blocks, steps or batches."""
    params, detokenizer = request.params, FakeDetokenizer(request)
    digest, output = 0, []
    for token_id in request.prompt_token_ids:
        digest = extend_digest(digest, token_id)
    while True:
        banned = request.stop_token_ids if len(output) < params.min_tokens else frozenset()
        token_id = next_token(digest, seed=request.seed, index=index, banned=banned)
        output.append(token_id)
        digest = extend_digest(digest, token_id)
        ends = token_id in request.stop_token_ids
        past_min_tokens = len(output) > params.min_tokens
        stop = detokenizer.append(token_id, ends=ends, check_stop=past_min_tokens)
        if stop is not None:
            return output, FinishReason.STOP, stop
        if token_id in request.eos_token_ids:
            return output, FinishReason.STOP, None
        if ends:
            return output, FinishReason.STOP, token_id
        num_tokens = len(request.prompt_token_ids) + len(output)
        if len(output) == params.max_tokens or num_tokens >= max_model_len:
            return output, FinishReason.LENGTH, None


def likely_tokens(digest: int, *, seed: int, count: int) -> list[tuple[int, float]]:
    """What `FakeRunner` says of the next token after a history: (id, logprob), best first."""
    token_id = next_token(digest, seed=seed, index=0, banned=frozenset())
    rank = 1 + token_id % 3
    return [((token_id + r - rank) % VOCAB_SIZE, -0.5 * r) for r in range(1, count + 1)]


def make_beam_request(request_id: str, prompt: list[int], *, width: int, max_tokens: int, **kwargs):
    """A request that `width` beams answer. `salt`, `priority`, `seed` as above, the rest is the search's."""
    own = {name: kwargs.pop(name) for name in ("salt", "priority", "seed") if name in kwargs}
    beams = Beams(width, max_tokens, **kwargs)
    request = make_request(
        request_id,
        prompt,
        temperature=0,
        logprobs=beams.num_candidates,
        max_tokens=max_tokens,
        detokenize=False,
        **own,
    )
    request.beams = beams
    return request


def expected_beams(request: Request) -> list[tuple[float, list[int]]]:
    """(score, output) of each hypothesis, best first, by a search over plain lists."""
    search, width = request.beams, request.beams.width
    live, ended = [(0.0, [])], []
    for length in range(1, search.max_tokens + 1):
        candidates = []
        for total, output in live:
            digest = 0
            for token_id in [*request.prompt_token_ids, *output]:
                digest = extend_digest(digest, token_id)
            for token_id, logprob in likely_tokens(digest, seed=request.seed, count=2 * width):
                candidates.append((total + logprob, [*output, token_id]))
        candidates.sort(key=lambda x: -x[0])
        candidates = candidates[: 2 * width]
        stops = [
            length == search.max_tokens or output[-1] in search.eos_token_ids
            for _, output in candidates
        ]
        scored = [(t / length**search.length_penalty, o) for t, o in candidates]
        ended += [x for x, stop in zip(scored[:width], stops[:width], strict=True) if stop]
        ended = sorted(ended, key=lambda x: -x[0])[:width]
        live = [x for x, stop in zip(candidates, stops, strict=True) if not stop][:width]
        if len(ended) == width and live:
            longest = search.early_stopping == "never" and search.length_penalty > 0
            hoped = live[0][0] / (search.max_tokens if longest else length) ** search.length_penalty
            if search.early_stopping is True or hoped <= ended[-1][0]:
                break
    return ended


@dataclass
class _Slot:
    """What the device keeps of one sequence."""

    sequence: Sequence  # only its constants are read: seed, index, prompt
    history: list[int]
    tables: dict[tuple[int, int], int]  # (KV-cache group, index) -> block
    digests: list[int] = field(default_factory=list)  # digests[i] stands for the KV of token i
    finished: bool = False

    def append(self, token_id: int) -> None:
        before = self.digests[-1] if self.digests else 0
        self.history.append(token_id)
        self.digests.append(extend_digest(before, token_id))


class FakeStore:
    """A disk that keeps block contents by hash, and can be damaged."""

    def __init__(self):
        self.content: dict[bytes, dict[int, int]] = {}
        self.damaged: set[bytes] = set()

    def load(self, block_hash: bytes) -> dict[int, int] | None:
        return None if block_hash in self.damaged else self.content.get(block_hash)


class FakeRunner:
    """A device without arithmetic. Asserts that each row reads its own history, and nothing else.

    Steps run when launched, in full; their results are handed out by `collect`, in order.
    A row of a group with a window may read what its tokens can see, and no more is looked at.
    `fail_launch` and `fail_collect` hold numbers of launches that raise RuntimeError: at once and
    without having changed anything, or when they are collected, after they wrote garbage.
    """

    num_recompiles = 0
    num_top_logprobs = 8

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        fail_launch: tuple[int, ...] = (),
        fail_collect: tuple[int, ...] = (),
        store: FakeStore | None = None,
        windows: tuple[int | None, ...] = (None,),
    ):
        self.store = store
        self.windows = windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.fail_launch = fail_launch
        self.fail_collect = fail_collect
        self.plans: list[StepPlan] = []
        self.num_computed_tokens = 0
        self._slots: dict[int, _Slot] = {}
        # (block, offset) -> (group, digest), and host block -> offset -> the same
        self._content: dict[tuple[int, int], tuple[int, int]] = {}
        self._host: dict[int, dict[int, tuple[int, int]]] = {}
        self._under_way: list[tuple[int, StepResult]] = []
        self.num_launches = 0
        self._broken = False

    def weights_changed(self) -> bool:
        return False

    def recover(self) -> bool:
        return False

    def forget_everything(self) -> None:
        """As if pool and request state had been lost with a failed step."""
        self._slots.clear()
        self._content.clear()
        self._host.clear()

    def launch(self, plan: StepPlan) -> int:
        handle, self.num_launches = self.num_launches, self.num_launches + 1
        if handle in self.fail_launch:
            raise RuntimeError(f"launch {handle} fails as told")
        assert len(self._under_way) < 2, "at most one step may wait while another is launched"
        self._check_shape(plan)
        self.plans.append(plan)
        self._apply_moves(plan)
        self._apply_updates(plan)
        # A step that will turn out to have failed spoils what it writes, and the step built on it.
        self._broken = any(x in self.fail_collect for x, _ in [*self._under_way, (handle, None)])
        self._under_way.append((handle, self._run(plan)))
        return handle

    def collect(self, handle: int) -> StepResult:
        if handle in self.fail_collect:
            self._under_way.clear()
            raise RuntimeError(f"step {handle} fails as told")
        first, result = self._under_way.pop(0)
        assert first == handle, f"step {first} must be collected before {handle}"
        return result

    def _check_shape(self, plan: StepPlan) -> None:
        lists = (plan.slots, plan.starts, plan.num_tokens, plan.samples)
        assert plan.num_rows > 0 and all(len(x) == plan.num_rows for x in lists)
        assert NULL_SLOT not in plan.slots and len(set(plan.slots)) == plan.num_rows
        decodes = all(count == 1 for count in plan.num_tokens) and all(plan.samples)
        assert plan.num_steps == 1 or (decodes and not plan.admissions)

    def _apply_moves(self, plan: StepPlan) -> None:
        if plan.moves is None:
            return
        for host_id, block_hash in plan.moves.stores:
            assert self.store is not None
            self.store.content[block_hash] = dict(self._host[host_id])
        for host_id, content in plan.moves.loads:
            self._host[host_id] = dict(content)
        for block_id, host_id in plan.moves.swaps_out:
            assert NULL_BLOCK < block_id < self.num_blocks and host_id > 0
            content = ((i, self._content.get((block_id, i))) for i in range(self.block_size))
            self._host[host_id] = {i: digest for i, digest in content if digest is not None}
        for host_id, block_id in plan.moves.swaps_in:
            assert NULL_BLOCK < block_id < self.num_blocks
            for offset in range(self.block_size):
                self._content.pop((block_id, offset), None)
            for offset, digest in self._host[host_id].items():
                self._content[block_id, offset] = digest

    def _apply_updates(self, plan: StepPlan) -> None:
        for sequence in plan.admissions:
            tables = {
                (group, index): block_id
                for group, table in enumerate(sequence.block_tables)
                for index, block_id in enumerate(table)
            }
            assert len(sequence.block_tables) == len(self.windows)
            slot = _Slot(sequence, [], tables)
            for token_id in sequence.token_ids:
                slot.append(token_id)
            self._slots[sequence.slot] = slot
        admitted = {sequence.slot for sequence in plan.admissions}
        updated = [update[:3] for update in plan.table_updates]
        assert len(set(updated)) == len(updated)
        for slot, group, index, block_id in plan.table_updates:
            assert slot in plan.slots and slot not in admitted
            self._slots[slot].tables[group, index] = block_id
        destinations = [destination for _, destination in plan.block_copies]
        assert len(set(destinations)) == len(destinations)
        copied = {
            (destination, offset): self._content.get((source, offset))
            for source, destination in plan.block_copies
            for offset in range(self.block_size)
        }
        self._content.update({k: v for k, v in copied.items() if v is not None})

    def _run(self, plan: StepPlan) -> StepResult:
        steps, rows = plan.num_steps, plan.num_rows
        result = StepResult(
            token_ids=np.zeros((steps, rows), np.int32),
            num_sampled=np.zeros(rows, np.int32),
            logprobs=np.zeros((steps, rows), np.float32),
            ranks=np.zeros((steps, rows), np.int32),
            top_token_ids=np.zeros((steps, rows, self.num_top_logprobs), np.int32),
            top_logprobs=np.zeros((steps, rows, self.num_top_logprobs), np.float32),
        )
        for step in range(steps):
            live = [row for row in range(rows) if not self._slots[plan.slots[row]].finished]
            self._write(plan, live, step)
            for row in live:
                self._read(plan, row, step)
            for row in live:
                if plan.samples[row]:
                    self._sample(plan, row, step, result)
        return result

    def _write(self, plan: StepPlan, live: list[int], step: int) -> None:
        written: set[tuple[int, int]] = set()
        for row in live:
            slot, start = self._slots[plan.slots[row]], plan.starts[row] + step
            for position in range(start, start + plan.num_tokens[row]):
                for group in range(len(self.windows)):
                    block_id = slot.tables[group, position // self.block_size]
                    assert NULL_BLOCK < block_id < self.num_blocks
                    where = (block_id, position % self.block_size)
                    assert where not in written, f"two rows write to {where}"
                    written.add(where)
                    self._content[where] = (group, -1 if self._broken else slot.digests[position])
        self.num_computed_tokens += len(written) // len(self.windows)

    def _read(self, plan: StepPlan, row: int, step: int) -> None:
        slot, count = self._slots[plan.slots[row]], plan.num_tokens[row]
        end = plan.starts[row] + step + count
        assert slot.sequence is plan.sequences[row], f"row {row} reads another sequence's slot"
        assert plan.samples[row] == (end == len(slot.history)), f"{end=} {len(slot.history)=}"
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(end - count - window + 1, 0)
            for position in range(end if self._broken else first, end):
                block_id = slot.tables[group, position // self.block_size]
                where = (block_id, position % self.block_size)
                assert self._content.get(where) == (group, slot.digests[position]), (
                    f"row {row} reads the KV of someone else at {position=}, {group=}, {where}"
                )
        if count == 0:
            parent, child = plan.sequences[row - 1], plan.sequences[row]
            assert row > 0 and parent.request is child.request and plan.samples[row - 1]
            assert slot.history == child.request.prompt_token_ids

    def _sample(self, plan: StepPlan, row: int, step: int, result: StepResult) -> None:
        slot = self._slots[plan.slots[row]]
        sequence, request = slot.sequence, slot.sequence.request
        min_len = len(request.prompt_token_ids) + request.params.min_tokens
        banned = request.stop_token_ids if len(slot.history) < min_len else frozenset()
        index = sequence.index if request.beams is None else 0  # of a beam it means nothing
        token_id = next_token(slot.digests[-1], seed=request.seed, index=index, banned=banned)
        slot.append(token_id)
        ended = token_id in request.stop_token_ids or len(slot.history) >= sequence.max_len
        slot.finished = ended
        # The sampled token has rank 1, 2 or 3; the id of rank r is `token_id + r - rank`. See `likely_tokens`.
        rank, best = 1 + token_id % 3, np.arange(1, self.num_top_logprobs + 1)
        result.token_ids[step, row] = token_id
        result.num_sampled[row] += 1
        result.ranks[step, row] = rank
        result.logprobs[step, row] = -0.5 * rank
        result.top_token_ids[step, row] = (token_id + best - rank) % VOCAB_SIZE
        result.top_logprobs[step, row] = -0.5 * best
