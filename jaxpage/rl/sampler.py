"""`Sampler`: an engine that samples with the live parameters of a trainer's module.

Coordinates requests, weights and pauses of one engine. Must not know trainers' layouts (`binding`) nor how an engine
runs.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
from flax import nnx

from jaxpage.async_llm.step_loop import PauseMode
from jaxpage.async_llm.tasks import Tasks
from jaxpage.build import build
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine.engine import Engine
from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.rl.binding import Binding
from jaxpage.rl.inputs import (
    check_options,
    group_seeds,
    listed_prompts,
    plain,
    sampling_params,
)
from jaxpage.rl.logprobs import logprobs, logprobs_of_rows
from jaxpage.rl.parity import ParityReport, compare
from jaxpage.rl.rollout import Padded, Rollout, make_rollout
from jaxpage.rl.scoring import Scored, make_scored, scoring_params
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.rl.strict import strict_logprobs
from jaxpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpage.engine.stats import EngineStats
    from jaxpage.runner.runner import Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Sampler:
    """Samples with the parameters of a live NNX module. All methods may be called from any thread.

    `module`: one of jaxpage's models, or a module with the layout of Tunix or MaxText. Its arrays are looked up at
    every launch and never held, so a trained module is sampled from directly: nothing is copied, and older KV is no
    longer found. Replace parameters between calls, or `pause` first: a step that runs meanwhile may see some new and
    some old ones.

    If the arrays are on other devices than the engine's, or sharded differently, the engine has a copy, which `update`
    refreshes.
    """

    def __init__(self, module: nnx.Module, model: str, **options: Any):
        """`model`: a folder with the module's config.json, and its tokenizer unless `skip_tokenizer_init`.

        `options` are those of `LLM`, with other defaults: `dtype` is the module's, `logprobs_mode` is "temperature".
        Raises ValueError for unsupported options, and for a module that does not fit config.json.
        """
        binding = Binding(module)
        options = {"dtype": binding.dtype, "logprobs_mode": "temperature"} | options
        if not hasattr(module, "visual"):  # perhaps the text part of a model with a vision tower
            options = {"limit_mm_per_prompt": {"image": 0}} | options
        config = EngineConfig.from_options(model=model, load_format="dummy", **options)
        check_options(config)
        # The module has floats, whatever config.json says of the checkpoint that it comes from.
        config = dataclasses.replace(config, quantization="dequantize")
        built = build(config, bind=binding.prepare)
        assert isinstance(built.engine, Engine)
        self.config: ResolvedConfig = built.config
        self._binding, self._engine = binding, built.engine
        # (number of replacements of the weights, version from there on), ascending; callers read it while it grows
        self._versions = [(0, 0)]
        runner: Any = built.engine.runner
        self._runner: Runner = runner
        self._read_weights(binding.refresh())
        runner.weights_changed()  # the first weights do not count as a change
        self._tasks = Tasks(built)
        self._is_asleep = False
        self.tokenizer: Any = built.tokenizer  # None with `skip_tokenizer_init`
        self.vocab_size = built.vocab_size
        pad_id = built.tokenizer and built.tokenizer.pad_token_id
        self.pad_id: int = pad_id or 0  # used in rollouts
        # The threads refer to the tasks, not to this object, so it can be collected while they run.
        self._finalizer = weakref.finalize(self, Tasks.shut_down, self._tasks)

    # Sampling.

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        n: int | None = None,
        seed: int | GroupSeeds | None = None,
    ) -> Rollout:
        """Sample `n` completions of each prompt, and return when all have ended.

        `prompts`: a list of texts or of lists of ids. `params`: None for temperature 1 up to `max_model_len`; `n`
        overrides `params.n`. Calls from several threads share steps: 256 threads with one prompt each are served like
        one call with 256.

        `seed`: the same seed and prompts give the same tokens, whatever else runs; equal prompts in one call differ.
        `GroupSeeds` counts equal prompts across calls, for members of a group that arrive one by one. None: the seed of
        `params`, else the engine's seeds, in the order of requests.

        Raises ValueError for what cannot be served, before anything runs; RuntimeError if a parameter was donated or
        deleted, or replaced by an array with another dtype, shape or sharding; StepFailedError and EngineDeadError as
        `AsyncLLM.generate`.
        """
        prompts = listed_prompts(prompts)
        if not prompts:
            raise ValueError("prompts are empty; give at least one")
        self._binding.check_usable()
        params = sampling_params(params, n, has_tokenizer=not self.config.skip_tokenizer_init)
        group = group_seeds(seed)
        version = self._notice_weight_changes() if isinstance(seed, GroupSeeds) else 0
        seeds: list[int] = []

        def prepare(inputs: InputProcessor) -> list[Request]:
            parsed = inputs.parse(prompts)
            if group is not None:
                seeds.extend(group.next(prompt.token_ids, version) for prompt in parsed)
                each = [dataclasses.replace(params, seed=seed) for seed in seeds]
                return inputs.requests(parsed, each)
            seeds.extend([-1 if params.seed is None else params.seed] * len(parsed))
            return inputs.requests(parsed, params)

        outputs = _wait(self._tasks.submit(prepare, len(prompts)))
        return make_rollout(
            outputs,
            seeds,
            pad_id=self.pad_id,
            temperature=params.temperature,
            logprobs_mode=self.config.logprobs_mode,
            version_of=self._version_of,
        )

    def score(
        self,
        token_ids: Sequence[Any],
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Scored:
        """The log-probabilities of given tokens, with the current weights: prompts are computed, nothing is generated.

        `token_ids`: sequences of ids, each shorter than `max_model_len`. `targets`: ids to score in place of these
        tokens, one for each. `top_k`: also return the most likely tokens in their place, at most `max_logprobs`. No
        cached KV is read. The device holds the logits of 64 tokens at a time, however long the sequences are.

        Raises ValueError for what cannot be served, and for a temperature other than 1; otherwise as `generate`.
        """
        if temperature != 1:
            raise ValueError(
                f"temperature={temperature} is not supported, only 1; use jaxpage.rl.logprobs for others"
            )
        if self.config.logprobs_mode.endswith("logits"):
            raise ValueError(f"logprobs_mode={self.config.logprobs_mode!r} has no logprobs")
        sequences = [plain(each) for each in token_ids]
        if not sequences:
            raise ValueError("token_ids are empty; give at least one sequence")
        wanted = None if targets is None else [plain(each) for each in targets]
        self._binding.check_usable()
        params = scoring_params(sequences, wanted, top_k)

        def prepare(inputs: InputProcessor) -> list[Request]:
            prompts = inputs.parse([{"prompt_token_ids": each} for each in sequences])
            return inputs.requests(prompts, params)

        return make_scored(_wait(self._tasks.submit(prepare, len(sequences))), top_k)

    def logprob_fn(self) -> Callable[..., jax.Array]:
        """`f(params, batch, temperature=1.0)`: `jaxpage.rl.logprobs` of parameters in the bound module's layout.

        Pure, and differentiable in `params`: the module, its `nnx.State`, or a tree of arrays with its names. With
        `numerics="strict"` its values equal the sampler's, bit for bit, on the same kind of device.
        """
        model_of, compute = self._binding.model_of, self._compute_logprobs()

        def logprob(params: Any, batch: Padded, temperature: float = 1.0) -> jax.Array:
            return compute(model_of(params), batch, temperature)

        return logprob

    def _compute_logprobs(self) -> Callable[..., jax.Array]:
        if self.config.numerics == "strict":
            return partial(strict_logprobs, block_size=self.config.block_size)
        return logprobs

    def check_parity(self, rollout: Rollout) -> ParityReport:
        """Compare a rollout with the forward pass of `logprob_fn`, with the current weights.

        Raises ValueError for a rollout that this cannot reproduce: from another weight version than the current one, or
        with logprobs of another mode than "temperature", or "raw" at temperature 1. With `numerics="strict"` raises
        ParityError if any logprob differs in any bit.
        """
        others = {v for row in rollout.weight_versions for v, _, _ in row} - {self.version}
        if others:
            raise ValueError(
                f"the rollout has tokens of weight versions {sorted(others)}; the current one is {self.version}"
            )
        mode, temperature = rollout.logprobs_mode, rollout.temperature
        if mode != "temperature" and (mode != "raw" or temperature not in (0, 1)):
            raise ValueError(f"logprobs_mode={mode!r} at temperature {temperature} is not compared")
        batch = rollout.to_padded(side="right")
        model, compute = self._binding.model_of(), self._compute_logprobs()
        found = logprobs_of_rows(compute, model, batch, temperature or 1.0)
        report = compare(batch.logprobs[batch.completion_mask], found[batch.completion_mask])
        if self.config.numerics == "strict":
            report.require_equal()
        return report

    # Weights.

    @property
    def version(self) -> int:
        """The version of the weights that the last step or `update` found: 0 at first, and 1 more after each change."""
        return self._version_of(self._engine.scheduler.counters.num_weight_changes)

    def update(
        self, params: Any = None, version: int | None = None, keep_cache: bool = False
    ) -> int:
        """Take new weights between two steps; returns their version.

        `params`: None to read the module again; or a module, an `nnx.State`, or a tree of arrays with the module's
        names, all or some, to sample with instead of the module's, which is not changed. These are held until the next
        `update`, except the module's own arrays. `version`: a number of the caller's choice. `keep_cache`: KV of the
        old weights is still found.

        Arrays on the engine's devices are not copied, and nothing is compiled. For a module on the engine's devices
        this call is not needed: each step checks by itself. Running requests continue with the new weights, and
        `weight_versions` says which tokens have which; `pause` first to avoid that. NumPy arrays are copied at each
        call, so they may be refilled afterwards. Raises ValueError for names or shapes that the module does not have,
        RuntimeError for arrays that were donated or deleted, or whose dtype or shape has changed in the module; the old
        weights then stay.
        """

        def take() -> int:
            binding = self._binding
            self._read_weights(binding.forget_swapped() if params is None else binding.swap(params))
            number = self._engine.notice_weight_changes(keep_cache=keep_cache)
            if version is not None:
                if self._versions[-1][0] == number:
                    self._versions[-1] = (number, version)
                else:
                    self._versions.append((number, version))
            return self._version_of(number)

        return self._call(take)

    def _read_weights(self, num_bytes: int) -> None:
        """Read what the binding says now, for which it has copied `num_bytes`."""
        if num_bytes:
            logger.info("copied %.1f MB of parameters to the engine's devices", num_bytes / 1e6)
        self._runner.read_from(self._binding.variables)

    def _notice_weight_changes(self) -> int:
        """The version of the weights as the next step finds them, whether or not a step has noticed them."""
        return self._call(lambda: self._version_of(self._engine.notice_weight_changes()))

    def _version_of(self, number: int) -> int:
        index = bisect_right(self._versions, number, key=itemgetter(0))
        known, version = self._versions[index - 1]
        return version + number - known

    # Pauses.

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop sampling; returns once the device is idle. Calls of `generate` that arrive in the meantime wait.

        Running requests are suspended ("keep"), finished ("wait"), or end with the tokens they have, which their calls
        return ("abort"). Without an `update` in between, a pause does not change the tokens of suspended requests.
        After one they continue with the new weights and their existing KV; `reset_prefix_cache(recompute=True)` has it
        recomputed. Raises ValueError for an unknown mode, RuntimeError for "wait" while asleep.
        """
        if mode not in tuple(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(PauseMode)}, got {mode!r}")
        check = self._check_awake if mode == PauseMode.WAIT else lambda: None
        self._tasks.pause(PauseMode(mode), check).result().result()

    def resume(self) -> None:
        """Continue, including the requests that arrived during the pause. Raises RuntimeError while asleep."""

        def resume() -> None:
            self._check_awake()
            self._tasks.steps.resume()

        self._call(resume)

    def _check_awake(self) -> None:
        """In the engine's thread, as everything that depends on whether the sampler is asleep."""
        if self._is_asleep:
            raise RuntimeError("the sampler is asleep and has no KV pool; call wake() first")

    @property
    def is_paused(self) -> bool:
        return self._tasks.steps.is_paused

    def abort(self) -> None:
        """End all requests with the tokens they have, which their calls return with finish_reason "abort".

        This includes calls whose prompts are still being prepared. Not a pause, and does not end one.
        """
        self._tasks.abort_all().result()

    def sleep(self, kv: bool = True, weights: bool = False) -> None:
        """Pause, suspending requests, and free the memory of the KV pool until `wake`; its content is recomputed.

        Raises ValueError for `weights=True`: they belong to the module, whose owner must move them; RuntimeError if
        another thread lets steps run again before the sampler sleeps.
        """
        if weights:
            raise ValueError("weights=True: the parameters belong to the module; move them there")
        self.pause("keep")
        if not kv:
            return

        def free() -> None:
            if self._is_asleep:
                return
            self._tasks.steps.check_suspended()
            self._is_asleep = True
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._runner.free_pool()

        self._call(free)

    def wake(self) -> None:
        """Allocate the KV pool again, and continue. Nothing is compiled."""

        def wake() -> None:
            if self._is_asleep:
                self._runner.recover()
                self._is_asleep = False
            self._tasks.steps.resume()

        self._call(wake)

    # The engine.

    def wait_until_warm(self) -> None:
        """Wait until every program is compiled. Raises what the compiler raised."""
        self._engine.wait_until_warm()

    def stats(self) -> EngineStats:
        """The engine's current counters."""
        return self._engine.stats()

    def reset_prefix_cache(self, recompute: bool = False) -> bool:
        """Discard all cached KV. Does nothing and returns False while requests hold blocks.

        With `recompute` they release them, and their KV is recomputed with the current weights.
        """
        return self._call(lambda: self._engine.reset_prefix_cache(reset_running_requests=recompute))

    def shutdown(self) -> None:
        """Stop the engine; waiting calls raise EngineDeadError. Also called at exit."""
        self._finalizer()

    def _call(self, action: Callable[[], T]) -> T:
        """Run `action` in the engine's thread, between two steps."""
        return self._tasks.steps.call(action).result()


def _wait(futures: Sequence[Future[RequestOutput]]) -> list[RequestOutput]:
    """All results; if one fails, the other requests are aborted."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
