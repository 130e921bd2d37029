"""Cheap doubles: a device that checks what it is told, a detokenizer of one letter per token.

`FakeRunner` keeps what a real device keeps (token histories, block tables, block contents, hidden
states) and moves it exactly as the plan says, asynchronously. It sees the plan and nothing else. It
does not compute KV: the "KV" of a token is a digest of all tokens up to it, so a row that reads a
slot it should not read is found out at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage.engine.beams import Beams
from jaxpage.engine.engine import Engine
from jaxpage.lora.request import Adapter, LoRARequest
from jaxpage.pictures.border import Expanded, Picture
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.plan import (
    NULL_BLOCK,
    NULL_SLOT,
    Admission,
    StepPlan,
    StepResult,
)
from jaxpage.request import FinishReason, Request
from jaxpage.sampling_params import RepetitionDetectionParams, SamplingParams

VOCAB_SIZE = 13


def make_request(request_id: str, prompt: list[int] | np.ndarray, **kwargs) -> Request:
    """A request without text; `prompt` has token ids, or embeddings [T, E].

    `salt`, `priority`, `eos`, `seed`, `features`, `mask_source`, `pictures`, `adapter` are the request's own, the rest
    params.
    """
    names = ("features", "mask_source", "pictures", "adapter")
    own = {name: kwargs.pop(name) for name in names if name in kwargs}
    salt, priority = kwargs.pop("salt", None), kwargs.pop("priority", 0)
    eos, seed = frozenset(kwargs.pop("eos", ())), kwargs.pop("seed", 0)
    params = SamplingParams(**kwargs)
    if params.ignore_eos:
        eos = frozenset()
    if isinstance(prompt, np.ndarray):
        own["prompt_embeds"], prompt = prompt, [0] * len(prompt)
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        stop_token_ids=eos | frozenset(params.stop_token_ids),
        eos_token_ids=eos,
        cache_salt=salt,
        priority=priority,
        **own,
    )
    request.slot_fields = slot_fields(request)
    return request


def slot_fields(request: Request) -> dict[str, Any]:
    """What `FakeRunner` must know of a request besides an `Admission`'s own fields."""
    return {
        "seed": request.seed,
        "stop_token_ids": sorted(request.stop_token_ids),
        "min_len": len(request.prompt_token_ids) + request.params.min_tokens,
        "is_beam": request.beams is not None,
        "is_masked": request.mask_source is not None,
        "embeds": request.prompt_embeds,
        "pictures": picture_places(request.pictures),
    }


class FakeFieldsEngine(Engine):
    """Gives requests that were made elsewhere the slot fields that `FakeRunner` reads."""

    def add(self, request: Request) -> None:
        request.slot_fields = slot_fields(request)
        super().add(request)


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

    def decode_token(self, token_id: int, before: Sequence[int] = ()) -> str:
        return chr(ord("a") + token_id % 26)


class FakeDrafts:
    """Guesses what the next tokens will be: mostly right, sometimes wrong from some token on."""

    def __init__(self, num_tokens: int, max_model_len: int):
        self.num_tokens, self.max_model_len = num_tokens, max_model_len

    def drafts(self, sequence: Sequence, most: int) -> list[int]:
        wanted, _, _ = expected_output(sequence.request, sequence.index, self.max_model_len)
        first = sequence.num_output_tokens
        drafts = wanted[first : first + max(most, 0)]
        wrong = hash((first, *drafts)) % 5  # which one, if there are so many
        return [(t + (i >= wrong)) % VOCAB_SIZE for i, t in enumerate(drafts)]


_PATIENCE = 40


class FakeMaskSource:
    """Allows about half of the tokens after each history, and is slow to say which.

    `delays[(index + i) % len(delays)]` times the i-th mask of a continuation is not there yet; a negative number means
    until somebody waits for it, or it was asked for _PATIENCE times. With `forces`, up to four tokens are forced after
    about a third of the histories. After `fails_after` tokens there are no more masks.
    """

    def __init__(
        self,
        seed: int = 0,
        delays: tuple[int, ...] = (0,),
        *,
        forces: bool = False,
        fails_after: int | None = None,
    ):
        self.seed = seed
        self.delays = delays
        self.forces = forces
        self.fails_after = fails_after
        self.num_calls = self.num_waits = 0
        self._errors: dict[int, str] = {}
        self._asked: dict[tuple[int, tuple[int, ...]], int] = {}  # how often
        self._pending: set[tuple[int, tuple[int, ...]]] = set()
        self._waited_for: set[tuple[int, tuple[int, ...]]] = set()

    def allowed(self, index: int, output_token_ids: Sequence[int]) -> frozenset[int]:
        history = (self.seed, index, *output_token_ids)
        # Token 8 ends nothing, so there is always something to sample.
        return frozenset(t for t in range(VOCAB_SIZE) if t == 8 or hash((*history, t)) % 2)

    def forced_run(self, index: int, output_token_ids: Sequence[int]) -> list[int]:
        # At the beginning all continuations have the same.
        history = hash((self.seed, -7, index if output_token_ids else 0, *output_token_ids))
        count = history // 3 % 5 if self.forces and history % 3 == 0 else 0
        return [(history // 15 + i) % VOCAB_SIZE for i in range(count)]

    def forced(self, index: int, output_token_ids: Sequence[int]) -> list[int]:
        key = (index, tuple(output_token_ids))
        delay = self.delays[(index + len(output_token_ids)) % len(self.delays)]
        asked = self._asked.get(key, 0)
        is_ready = key in self._waited_for or asked >= (delay if delay >= 0 else _PATIENCE)
        return self.forced_run(*key) if is_ready and self.error(index) is None else []

    def error(self, index: int) -> str | None:
        return self._errors.get(index)

    def mask(self, index: int, output_token_ids: Sequence[int]) -> np.ndarray | None:
        self.num_calls += 1
        key = (index, tuple(output_token_ids))
        asked = self._asked[key] = self._asked.get(key, 0) + 1
        delay = self.delays[(index + len(output_token_ids)) % len(self.delays)]
        if key not in self._waited_for and asked <= (delay if delay >= 0 else _PATIENCE):
            self._pending.add(key)
            return None
        self._pending.discard(key)
        if self.fails_after is not None and len(output_token_ids) >= self.fails_after:
            self._errors[index] = f"no mask after {self.fails_after} tokens"
            return None
        return pack_mask(self.allowed(index, output_token_ids))

    def restart(self) -> None:
        self._errors.clear()
        self._asked.clear()
        self._pending.clear()
        self._waited_for.clear()

    def wait(self, seconds: float) -> None:
        assert self._pending, "nobody was told to come back later"
        self.num_waits += 1
        self._waited_for |= self._pending


def pack_mask(token_ids: frozenset[int]) -> np.ndarray:
    """uint32[ceil(V / 32)], bit i % 32 of word i // 32 for token i."""
    words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def banned_by(mask: np.ndarray) -> frozenset[int]:
    return frozenset(t for t in range(VOCAB_SIZE) if not mask[t // 32] >> (t % 32) & 1)


def make_adapter(number: int) -> Adapter:
    """The adapter of a number above 0."""
    request = LoRARequest(f"adapter {number}", number, "nowhere")
    return Adapter(request=request, key=f"adapter {number}", arrays=(np.array([number]),))


def first_digest(adapter: int) -> int:
    """Stands for the weights of an adapter, 0 for none: all KV depends on them."""
    return hash(("adapter", adapter)) if adapter else 0


def extend_digest(digest: int, token: Hashable) -> int:
    """Stands for the KV of a token, or of an embedding: it depends on all tokens so far."""
    return hash((digest, token))


PicturePlace = tuple[bytes, int, int, tuple[int, ...]]


def picture_places(pictures: PromptPictures | None) -> list[PicturePlace]:
    """(content hash, first token, number of tokens, those without an embedding) of each picture."""
    places = [] if pictures is None else zip(pictures.pictures, pictures.spans, strict=True)
    return [(picture.content_hash, *span, picture.breaks) for picture, span in places]


def inputs(
    token_ids: list[int],
    embeds: np.ndarray | None,
    pictures: Sequence[PicturePlace] = (),
) -> list[Hashable]:
    """What the model is given for these tokens, for some of which embeddings may stand."""
    given: list[Hashable] = list(token_ids)
    if embeds is not None:
        given[: len(embeds)] = [("embedding", *row.tolist()) for row in embeds]
    for content_hash, first, number, breaks in pictures:
        for i in (i for i in range(number) if i not in breaks):
            given[first + i] = (content_hash, i)
    return given


def make_pictures(
    prompt: list[int], *spans: tuple[int, int, int], row: int | None = None
) -> PromptPictures:
    """Pictures that stand in a prompt, of (first token, number of tokens, which one it is).

    `row`: every so many of their tokens, the last one has no embedding.
    """
    pictures = [
        Picture(
            patches=np.full((number, 1), content, np.float32),
            grid=(1, 1, number),
            num_tokens=number,
            breaks=() if row is None else tuple(range(row - 1, number, row)),
            content_hash=b"%032d" % content,
        )
        for _, number, content in spans
    ]
    return PromptPictures.of(
        Expanded(
            token_ids=list(prompt),
            spans=tuple((first, number) for first, number, _ in spans),
            positions=None,
            next_position=len(prompt),
        ),
        pictures,
    )


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
    adapter = 0 if request.adapter is None else request.adapter.request.lora_int_id
    digest, output = first_digest(adapter), []
    places = picture_places(request.pictures)
    for token in inputs(request.prompt_token_ids, request.prompt_embeds, places):
        digest = extend_digest(digest, token)
    max_len = max_model_len
    if params.max_tokens is not None:
        max_len = min(len(request.prompt_token_ids) + params.max_tokens, max_len)
    source = request.mask_source
    while True:
        forced, is_forced = [] if source is None else source.forced_run(index, output), False
        for token_id in forced:
            num_tokens = len(request.prompt_token_ids) + len(output)
            if token_id in request.stop_token_ids or num_tokens == max_len - 1:
                break
            output.append(token_id)
            digest = extend_digest(digest, token_id)
            check_stop = len(output) > params.min_tokens
            stop = detokenizer.append(token_id, ends=False, check_stop=check_stop)
            if stop is not None:
                return output, FinishReason.STOP, stop
            is_forced = True
        if is_forced:
            continue  # something else may be forced then
        if source is not None and source.fails_after is not None:
            if len(output) >= source.fails_after:
                return output, FinishReason.ERROR, f"no mask after {source.fails_after} tokens"
        banned = request.stop_token_ids if len(output) < params.min_tokens else frozenset()
        if request.mask_source is not None:
            banned |= frozenset(range(VOCAB_SIZE)) - request.mask_source.allowed(index, output)
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
        repetition = params.repetition_detection
        if len(output) >= params.min_tokens and ends_with_a_repetition(output, repetition):
            return output, FinishReason.REPETITION, "repetition_detected"


def ends_with_a_repetition(output: list[int], params: RepetitionDetectionParams | None) -> bool:
    """By counting: some pattern at the end stands there `min_count` times in a row."""
    if params is None:
        return False
    sizes = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
    patterns = (output[-size:] * params.min_count for size in sizes if size <= len(output))
    return any(output[-len(p) :] == p for p in patterns)


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
    request.slot_fields = slot_fields(request)
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

    admission: Admission
    tables: dict[tuple[int, int], int]  # (KV-cache group, index) -> block
    adapter: int  # what was in its adapter slot when it was admitted
    history: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)  # digests[i] stands for the KV of token i
    hidden: int | None = None  # of the token computed last: its digest
    finished: bool = False

    def append(self, token_id: int, token: Hashable) -> None:
        before = self.digests[-1] if self.digests else first_digest(self.adapter)
        self.history.append(token_id)
        self.digests.append(extend_digest(before, token))

    def guess(self, number: int) -> list[int]:
        """What a draft model expects: what will be sampled, but for bans and every fifth token."""
        digest, drafts = self.digests[-1], list[int]()
        seed, index = self.admission.fields["seed"], self.admission.sequence_index
        for _ in range(number):
            token_id = next_token(digest, seed=seed, index=index, banned=frozenset())
            drafts.append((token_id + (digest % 5 == 0)) % VOCAB_SIZE)
            digest = extend_digest(digest, drafts[-1])
        return drafts


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
    With `sends_plans` a plan arrives pickled. `fail_launch` and `fail_collect` hold numbers of
    launches that raise RuntimeError: at once and without having changed anything, or when they are
    collected, after they wrote garbage. With `whole_pictures` no row may end within a picture.
    `num_states`: of a model with a recurrent state, the slots of all states. The state after a token is its digest; a
    slot has those after a row's last known token and after each of its drafts.
    """

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
        sends_plans: bool = False,
        whole_pictures: bool = False,
        num_states: int = 0,
    ):
        # slot -> (number of tokens, the digests of the last of them and of drafts behind it)
        self._states: dict[int, tuple[int, list[int]]] | None = {} if num_states else None
        self._num_states = num_states
        self.sends_plans = sends_plans
        self.whole_pictures = whole_pictures
        self.store = store
        self.windows = windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.fail_launch = fail_launch
        self.fail_collect = fail_collect
        self.steps_are_done = False  # once they are launched, as far as `is_done` tells
        self.plans: list[StepPlan] = []
        self.num_computed_tokens = 0
        self._slots: dict[int, _Slot] = {}
        # (block, offset) -> (group, digest), and host block -> offset -> the same
        self._content: dict[tuple[int, int], tuple[int, int]] = {}
        self._host: dict[int, dict[int, tuple[int, int]]] = {}
        # The picture cache: row -> (content hash, which of its embeddings)
        self._picture_rows: dict[int, tuple[bytes, int]] = {}
        self.encoded: list[bytes] = []  # content hashes, in order
        self._adapters: dict[int, int] = {}  # adapter slot -> number
        self._under_way: list[tuple[int, StepResult]] = []
        self.num_launches = 0
        self._broken = False

    @property
    def num_recompiles(self) -> int:
        return 0

    def weights_changed(self) -> bool:
        return False

    def wait_until_warm(self) -> None:
        pass

    def store_blocks(
        self, device: list[tuple[int, bytes]], host: list[tuple[int, bytes]], /
    ) -> None:
        assert self.store is not None
        for block_id, block_hash in device:
            self.store.content[block_hash] = self._read_block(block_id)
        for host_id, block_hash in host:
            self.store.content[block_hash] = dict(self._host[host_id])

    def recover(self) -> bool:
        return False

    def forget_everything(self) -> None:
        """As if pool and request state had been lost with a failed step."""
        self._slots.clear()
        self._content.clear()
        self._host.clear()
        self._picture_rows.clear()
        if self._states is not None:
            self._states.clear()

    def launch(self, plan: StepPlan) -> int:
        handle, self.num_launches = self.num_launches, self.num_launches + 1
        if handle in self.fail_launch:
            raise RuntimeError(f"launch {handle} fails as told")
        assert len(self._under_way) < 2, "at most one step may wait while another is launched"
        if self.sends_plans:
            plan = pickle.loads(pickle.dumps(plan))
        self._check_shape(plan)
        self.plans.append(plan)
        self._apply_transfers(plan)
        self._apply_updates(plan)
        self._encode(plan)
        self._check_rows(plan)
        # A step that will turn out to have failed spoils what it writes, and the step built on it.
        self._broken = any(x in self.fail_collect for x, _ in [*self._under_way, (handle, None)])
        self._under_way.append((handle, self._run(plan)))
        for slot, saved in plan.state_saves:
            assert slot in plan.slots
            self._copy_state(slot, saved)
        return handle

    def is_done(self, handle: int) -> bool:
        return self.steps_are_done

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
        first_late = plan.num_rows - plan.num_late_rows
        assert not any(plan.num_tokens[first_late:]) and all(plan.samples[first_late:])
        decodes = all(count == 1 for count in plan.num_tokens) and all(plan.samples)
        plain = not (plan.admissions or plan.masks or plan.input_embeds or plan.picture_tokens)
        assert plan.num_steps == 1 or (decodes and plain)
        if not plan.runs_draft_model:
            assert {row: len(drafts) for row, drafts in plan.drafts.items()} == plan.num_drafts
        for row, number in plan.num_drafts.items():
            assert number and plan.num_tokens[row] == 1 + number and plan.samples[row]
            assert plan.num_steps == 1 and row < first_late and row not in plan.masks
            assert not self._under_way, "drafts follow from tokens that the host knows"

    def _encode(self, plan: StepPlan) -> None:
        for picture, rows in plan.encodes:
            tokens = [i for i in range(picture.num_tokens) if i not in picture.breaks]
            assert 0 not in rows and len(set(rows.tolist())) == len(rows)
            embeddings = [(picture.content_hash, i) for i in tokens]
            self._picture_rows.update(zip(rows.tolist(), embeddings, strict=True))
            self.encoded.append(picture.content_hash)

    def _check_pictures(self, plan: StepPlan) -> None:
        """Each token that a picture stands for reads the embedding that is its own, no other token reads any."""
        read: dict[tuple[int, int], tuple[bytes, int]] = {}
        for row, offset, rows in plan.picture_tokens:
            for i, picture_row in enumerate(rows.tolist()):
                assert (row, offset + i) not in read
                if picture_row:
                    read[row, offset + i] = self._picture_rows[picture_row]
        wanted = {}
        for row, slot_id in enumerate(plan.slots):
            start, end = plan.starts[row], plan.starts[row] + plan.num_tokens[row]
            places = self._slots[slot_id].admission.fields["pictures"]
            for content_hash, first, number, breaks in places:
                assert not (self.whole_pictures and start < end and first < end < first + number)
                for position in range(max(start, first), min(end, first + number)):
                    if position - first not in breaks:
                        wanted[row, position - start] = (content_hash, position - first)
        assert read == wanted

    def _check_rows(self, plan: StepPlan) -> None:
        self._check_pictures(plan)
        embeds = dict(plan.input_embeds)
        assert len(embeds) == len(plan.input_embeds)
        for row, slot_id in enumerate(plan.slots):
            slot = self._slots[slot_id]
            fields, adapter_slot = slot.admission.fields, slot.admission.adapter_slot
            assert self._adapters.get(adapter_slot, 0) == slot.adapter, "another adapter is there"
            assert (plan.num_steps == 1 and row not in plan.num_drafts) or not fields["is_beam"]
            assert (row in plan.masks) == (fields["is_masked"] and plan.samples[row])
            start, wanted = plan.starts[row], fields["embeds"]
            if wanted is None or start >= len(wanted) or not plan.num_tokens[row]:
                assert row not in embeds
            else:
                wanted = wanted[start : start + plan.num_tokens[row]]
                np.testing.assert_array_equal(embeds[row], wanted, strict=True)

    def _apply_transfers(self, plan: StepPlan) -> None:
        if plan.transfers is None:
            return
        for host_id, block_hash in plan.transfers.stores:
            assert self.store is not None
            self.store.content[block_hash] = dict(self._host[host_id])
        for host_id, content in plan.transfers.loads:
            self._host[host_id] = dict(content)
        for block_id, host_id in plan.transfers.swaps_out:
            assert NULL_BLOCK < block_id < self.num_blocks and host_id > 0
            self._host[host_id] = self._read_block(block_id)
        for host_id, block_id in plan.transfers.swaps_in:
            assert NULL_BLOCK < block_id < self.num_blocks
            for offset in range(self.block_size):
                self._content.pop((block_id, offset), None)
            for offset, digest in self._host[host_id].items():
                self._content[block_id, offset] = digest

    def _read_block(self, block_id: int) -> dict[int, tuple[int, int]]:
        content = ((i, self._content.get((block_id, i))) for i in range(self.block_size))
        return {i: digest for i, digest in content if digest is not None}

    def _apply_updates(self, plan: StepPlan) -> None:
        for adapter_slot, (number,) in plan.adapter_loads:
            assert adapter_slot > 0
            self._adapters[adapter_slot] = int(number.item())
        for admission in plan.admissions:
            tables = {
                (group, index): block_id
                for group, table in enumerate(admission.block_tables)
                for index, block_id in enumerate(table)
            }
            assert len(admission.block_tables) == len(self.windows)
            slot = _Slot(admission, tables, self._adapters.get(admission.adapter_slot, 0))
            fields = admission.fields
            tokens = inputs(admission.token_ids, fields["embeds"], fields["pictures"])
            for token_id, token in zip(admission.token_ids, tokens, strict=True):
                slot.append(token_id, token)
            self._slots[admission.slot] = slot
            if admission.state_slot:
                self._copy_state(admission.state_slot, admission.slot)
        for slot_id, start, token_ids in plan.forced_tokens:
            slot = self._slots[slot_id]
            assert slot_id in plan.slots and start == len(slot.history) and token_ids
            for token_id in token_ids:
                slot.append(token_id, token_id)
        self._drafts = dict(plan.drafts)
        if plan.runs_draft_model:
            self._drafts = {
                row: self._slots[plan.slots[row]].guess(number)
                for row, number in plan.num_drafts.items()
            }
        for row, drafts in self._drafts.items():
            for token_id in drafts:  # until the row samples
                self._slots[plan.slots[row]].append(token_id, token_id)
        admitted = {admission.slot for admission in plan.admissions}
        assert len(admitted) == len(plan.admissions)
        updated = [update[:3] for update in plan.table_updates]
        assert len(set(updated)) == len(updated)
        # As many as `step_layout` has room for.
        computed = [plan.num_steps * count for count in plan.num_tokens]
        most = sum(count // self.block_size + 2 for count in computed)
        assert len(updated) <= len(self.windows) * most
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
        shape = (max([steps, *(1 + number for number in plan.num_drafts.values())]), rows)
        result = StepResult(
            token_ids=np.zeros(shape, np.int32),
            num_sampled=np.zeros(rows, np.int32),
            logprobs=np.zeros(shape, np.float32),
            ranks=np.zeros(shape, np.int32),
            top_token_ids=np.zeros((*shape, self.num_top_logprobs), np.int32),
            top_logprobs=np.zeros((*shape, self.num_top_logprobs), np.float32),
        )
        for step in range(steps):
            live = [row for row in range(rows) if not self._slots[plan.slots[row]].finished]
            self._write(plan, live, step)
            if self._states is not None:
                self._advance_states(plan, live, step, self._states)
            for row in live:
                if row < rows - plan.num_late_rows:
                    self._read(plan, row, step)
            for row in live:
                if row in self._drafts:
                    self._verify(plan, row, self._drafts[row], result)
                elif plan.samples[row]:
                    end = plan.starts[row] + step + plan.num_tokens[row]
                    self._sample(plan, row, step, result, end)
        return result

    def _copy_state(self, source: int, destination: int) -> None:
        assert self._states is not None and {source, destination} <= set(range(1, self._num_states))
        self._states[destination] = self._states[source]

    def _advance_states(
        self, plan: StepPlan, live: list[int], step: int, states: dict[int, tuple[int, list[int]]]
    ) -> None:
        for row in live:
            slot_id, count, start = plan.slots[row], plan.num_tokens[row], plan.starts[row] + step
            digests = self._slots[slot_id].digests
            if count == 0 and row < plan.num_rows - plan.num_late_rows:
                states[slot_id] = states[plan.slots[row - 1]]
            num_drafts = plan.num_drafts.get(row, 0)
            if count and start and not self._broken:
                length, found = states[slot_id]
                num_accepted = start - length
                assert num_accepted >= 0 and found[num_accepted] == digests[start - 1], (
                    f"{row=} has the state of others"
                )
                # The device has room for accepted drafts, one known token, and new drafts.
                assert not (num_accepted or num_drafts) or count == 1 + num_drafts
            if count:
                end = start + count
                new = digests[end - num_drafts - 1 : end]
                states[slot_id] = (end - num_drafts, [-1] if self._broken else new)

    def _verify(self, plan: StepPlan, row: int, drafts: list[int], result: StepResult) -> None:
        slot = self._slots[plan.slots[row]]
        known = plan.starts[row] + 1
        assert slot.history[known:] == drafts
        del slot.history[known:], slot.digests[known:]
        for index, draft in enumerate([*drafts, None]):
            slot.hidden = -1 if self._broken else slot.digests[-1]
            self._sample(plan, row, index, result, known + index)
            if slot.finished or slot.history[-1] != draft:
                break

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
        at_end = end == len(slot.history)
        may_wait = slot.admission.fields["is_masked"] and at_end
        assert plan.samples[row] == at_end or may_wait, f"{end=} {len(slot.history)=}"
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(end - count - window + 1, 0)
            for position in range(end if self._broken else first, end):
                block_id = slot.tables[group, position // self.block_size]
                where = (block_id, position % self.block_size)
                assert self._content.get(where) == (group, slot.digests[position]), (
                    f"row {row} reads the KV of someone else at {position=}, {group=}, {where}"
                )
        if count == 0:
            parent = self._slots[plan.slots[row - 1]]
            assert row > 0 and parent.admission.fields["seed"] == slot.admission.fields["seed"]
            assert slot.history == parent.history[: len(slot.history)]
            assert len(slot.admission.token_ids) == end
            slot.hidden = parent.hidden
        else:
            slot.hidden = -1 if self._broken else slot.digests[end - 1]

    def _sample(self, plan: StepPlan, row: int, step: int, result: StepResult, end: int) -> None:
        slot = self._slots[plan.slots[row]]
        admission, fields = slot.admission, slot.admission.fields
        assert slot.hidden == slot.digests[-1] or self._broken, "sampled from an old hidden state"
        assert end == len(slot.history)
        stop_ids = frozenset(fields["stop_token_ids"])
        banned = stop_ids if len(slot.history) < fields["min_len"] else frozenset()
        if row in plan.masks:
            banned |= banned_by(plan.masks[row])
        index = 0 if fields["is_beam"] else admission.sequence_index  # of a beam it means nothing
        token_id = next_token(slot.digests[-1], seed=fields["seed"], index=index, banned=banned)
        slot.append(token_id, token_id)
        slot.finished = token_id in stop_ids or len(slot.history) >= admission.max_len
        # The sampled token has rank 1, 2 or 3; the id of rank r is `token_id + r - rank`. See `likely_tokens`.
        rank, best = 1 + token_id % 3, np.arange(1, self.num_top_logprobs + 1)
        result.token_ids[step, row] = token_id
        result.num_sampled[row] += 1
        result.ranks[step, row] = rank
        result.logprobs[step, row] = -0.5 * rank
        result.top_token_ids[step, row] = (token_id + best - rank) % VOCAB_SIZE
        result.top_logprobs[step, row] = -0.5 * best
